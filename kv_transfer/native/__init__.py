"""The native part of moving KV: one C++ file, its build."""
