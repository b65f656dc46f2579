"""What a run can lack: every folder can be deleted, with its tests."""
