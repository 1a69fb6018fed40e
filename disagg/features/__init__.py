"""Features of roles, as parts (disagg/role.py); only the assembler imports them."""
