"""Ways for frames to travel, one file each, behind `kv_transfer.transport`."""
