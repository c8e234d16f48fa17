"""python -m weightserver: the same as the command `weightserver`."""

from weightserver.cli import main

main()
