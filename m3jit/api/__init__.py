"""The public Python interface: programs as functions, the builder, extensions.  Import its names from `m3jit`."""
