"""How weights reach a device and gradients go home: one module a route."""
