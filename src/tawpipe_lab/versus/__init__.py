"""Check ``rivals`` of ``tawpipe prove``: our strategies beside FSDP2 and a user's own loop, predicted and measured."""
