"""HTTP service: settings, requests and answers."""
