"""The model in the box: a small code model that needs no download. README.md beside this file is its card."""
