"""Federated learning: islands at several owners train one model, and no data leaves its owner."""
