"""The command line: turns arguments into engine calls and results into text. Imports torch only inside commands."""
