"""What an append is: its tensors and flags, the layouts of caches, the rules for arguments, and the record of faulty rows."""
