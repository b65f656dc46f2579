"""The command `import-profile`."""
