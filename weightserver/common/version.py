"""The version of the package, and what it works with."""

__version__ = "0.3.0"
FORMAT = "0.3"
"""The minor version. It names the protocol and everything stored: calls, directories and backups of another minor
version are refused, so a change of any of them changes it."""


def works_with(version: str) -> bool:
    """Whether this version works with a client or shard of that version."""
    return version.split(".")[:2] == FORMAT.split(".")


def refusal(found: object) -> str:
    """What to say of a directory or backup of another format."""
    return (
        f"has format {str(found)[:20]}, weightserver {__version__} reads {FORMAT} only: use the version that wrote it, "
        "or begin anew"
    )
