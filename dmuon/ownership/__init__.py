"""One owner for every matrix, beside FSDP2."""
