"""The arrows: messages, contracts and configuration. msgspec and the standard library only."""
