"""Assignment of documents, rows and lengths to micro-batches and devices, with plain numbers and without torch."""
