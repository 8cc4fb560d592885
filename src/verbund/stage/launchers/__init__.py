"""Launchers: scripts and manifests by which a scheduler starts a run over its machines."""
