"""How documents, rows and their lengths are dealt to micro-batches and devices. It knows numbers alone: no torch."""
