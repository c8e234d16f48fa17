"""The client of a cluster: connections, retries, sessions, fetches.

Import from it: `WeightClient` and its results, which `weightserver` exports; `security`, and `channels.open_channel`.
It may import: `common`, `core` and `protocol`.
"""
