"""``python -m maru_core.cli``: the command ``maru`` where its script is not on the path."""

from maru_core.cli import main

if __name__ == "__main__":
    main(prog_name="maru")
