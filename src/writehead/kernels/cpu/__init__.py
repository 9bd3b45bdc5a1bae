"""Native kernels for the CPU: C++ behind a plain C ABI, several instruction sets in one library.

`native/` holds the sources; `library` finds and opens what was built from them; `kernels` speaks the contract.
"""
