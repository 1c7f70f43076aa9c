"""The models' own libraries on the same weights, each in a process of its own."""
