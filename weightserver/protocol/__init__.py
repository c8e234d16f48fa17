"""The wire: the generated protobuf code and the codec that both sides share.

Import from it: `codec` and `status`; `_generated` by the client, the server, the operations and the tests.
It may import: `common` and `core`.
"""
