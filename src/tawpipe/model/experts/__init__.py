"""Mixtures of experts: adapters on experts, and the loss that balances them."""
