"""The native CPU engine: C++ sources and how they are built. `engine.native_library` loads what `build` made."""
