"""The service over HTTP: settings, requests, answers."""
