"""Words and files of other trainers, and the command `import-profile`."""
