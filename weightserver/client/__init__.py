"""The client of a cluster: connections, retries, sessions, fetches.

Import from it: `WeightClient` and its results, which `weightserver` exports; `security`, `connection.open_channel` and
`tls_diagnosis` by the operations.
It may import: `common`, `core` and `protocol`.
"""
