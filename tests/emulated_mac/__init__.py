"""An emulated Mac: tests run with the standard library, the programs and the device facts of macOS, on Linux."""
