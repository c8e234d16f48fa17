"""The command line: weightserver serve | certs | health | top | inspect | verify | checkpoints | rollback | release |
extend | export | drop | backup | restore | reshard | compact | plan."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from shutil import disk_usage
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weightserver.client.client import WeightClient
from weightserver.client.connection import open_channel
from weightserver.client.tls_diagnosis import tls_failure
from weightserver.common.addresses import split_address
from weightserver.common.atomic_files import to_path
from weightserver.common.logs import LOG_FORMATS, log_events, print_error
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.security import TOKEN_VARIABLE, add_security_options, security_options
from weightserver.common.version import __version__
from weightserver.core.errors import (
    AuthenticationError,
    NoTableError,
    ShardUnavailableError,
    StorageError,
    WeightServerError,
)
from weightserver.operations.export import add_export_options, export_rows, non_empty_name
from weightserver.operations.plan import Workload, plan
from weightserver.protocol._generated import weight_server_pb2 as pb


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command. Exit status 0; 1 with a line on stderr when it failed; 2 for bad arguments; 130 for Ctrl-C."""
    _open_standard_streams()
    arguments = _parser().parse_args(argv)
    keep_large_buffers()
    log_events(getattr(arguments, "log_format", "text"))
    try:
        arguments.run(arguments)
    except (WeightServerError, ValueError, OSError) as error:
        print_error(f"weightserver {arguments.command}: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        print_error(f"weightserver {arguments.command}: stopped")
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _open_standard_streams() -> None:
    """A closed one would be the next file that is opened, such as data.mdb, and be written what is meant for stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weightserver", description="Serve and look after the rows of a classifier.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="serve one shard until SIGTERM")
    serve.add_argument("--data-dir", type=to_path, required=True, help="the shard's own directory, on a local disk")
    serve.add_argument(
        "--init",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="begin a new, empty shard where the directory is empty or missing (default: refuse it)",
    )
    serve.add_argument("--shard", type=int, default=0, help="number of this shard, from 0 (default 0)")
    serve.add_argument("--num-shards", type=int, default=1, help="shards in the cluster (default 1)")
    serve.add_argument("--listen", default="127.0.0.1:50051", help="host:port (default 127.0.0.1:50051)")
    serve.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this port")
    serve.add_argument("--metrics-host", default="127.0.0.1", help="address of the metrics (default 127.0.0.1)")
    serve.add_argument("--grace-seconds", type=float, default=10.0, help="time for running calls after SIGTERM (10)")
    serve.add_argument(
        "--request-memory-mib", type=int, default=4096, help="memory for the requests in progress (default 4096)"
    )
    serve.add_argument(
        "--stall-seconds", type=float, default=10.0, help="time until a silent caller is cut off (default 10)"
    )
    serve.add_argument(
        "--no-verify-reads",
        dest="verify_reads",
        action="store_false",
        help="skip the checksums of fetched rows",
    )
    serve.add_argument("--tls-cert", type=to_path, help="serve TLS with this certificate (PEM)")
    serve.add_argument("--tls-key", type=to_path, help="its key (PEM)")
    serve.add_argument("--tls-client-ca", type=to_path, help="take only clients with a certificate of this CA (PEM)")
    serve.add_argument("--token-file", type=to_path, help=f"token that calls must bring (default ${TOKEN_VARIABLE})")
    serve.add_argument("--insecure", action="store_true", help="listen beyond loopback without TLS or a token")
    serve.add_argument("--reflection", action="store_true", help="tell the contract over gRPC reflection")
    serve.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="how events are logged (default text)")
    serve.add_argument("--announce", action="store_true", help="print the addresses as one JSON line when serving")
    serve.add_argument("--stop-with-parent", action="store_true", help="stop when stdin is closed")
    serve.set_defaults(run=_serve)

    certs = commands.add_parser("certs", help="make a CA, certificates and a token for a quick start")
    certs.add_argument("directory", type=to_path, help="where to write them; what exists is not overwritten")
    certs.add_argument(
        "--host", nargs="+", action="extend", required=True, help="names and addresses that clients connect to"
    )
    certs.add_argument("--days", type=int, default=365, help="how long they hold (default 365)")
    certs.set_defaults(run=_certs)

    health = commands.add_parser("health", help="tell whether a shard serves (exit status 0) or not (1)")
    health.add_argument("address", help="host:port")
    health.add_argument("--timeout-seconds", type=float, default=5.0, help="deadline (default 5)")
    health.add_argument("--data-dir", type=to_path, help="the shard's own directory, whose volume must have room left")
    health.add_argument("--min-free-mib", type=int, default=256, help="how much of it (default 256)")
    add_security_options(health)
    health.set_defaults(run=_health)

    top = commands.add_parser("top", help="watch shards in the terminal")
    top.add_argument("addresses", nargs="+", help="host:port of the metrics of every shard")
    top.add_argument("--interval-seconds", type=float, default=2.0, help="time between two looks (default 2)")
    top.add_argument("--count", type=int, help="how many looks (default until Ctrl-C)")
    top.set_defaults(run=_top)

    inspect = commands.add_parser("inspect", help="print what a data directory holds; safe beside a running shard")
    inspect.add_argument("directory", type=to_path, help="the --data-dir of a shard")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="read everything in a directory that no shard serves")
    verify.add_argument("directory", type=to_path, help="the --data-dir of a shard")
    verify.set_defaults(run=_verify)

    checkpoints = commands.add_parser("checkpoints", help="list the checkpoints that all shards keep")
    _add_addresses(checkpoints)
    checkpoints.set_defaults(run=_checkpoints)

    rollback = commands.add_parser("rollback", help="take all rows back to a checkpoint; fences whoever writes")
    rollback.add_argument("name", type=non_empty_name, help="the checkpoint's name")
    _add_addresses(rollback)
    rollback.add_argument("--yes", action="store_true", help="do it; without this, only say what would be lost")
    rollback.set_defaults(run=_rollback)

    release = commands.add_parser("release", help="forget a checkpoint; whoever writes goes on")
    release.add_argument("name", type=non_empty_name, help="the checkpoint's name")
    _add_addresses(release)
    release.set_defaults(run=_release)

    backup = commands.add_parser("backup", help="copy a checkpoint of all shards to files while training goes on")
    _add_addresses(backup)
    backup.add_argument("--output", type=to_path, required=True, help="a new directory, or that of a stopped backup")
    backup.add_argument("--checkpoint", type=non_empty_name, help="its name (default the newest that all shards keep)")
    backup.set_defaults(run=_backup)

    restore = commands.add_parser("restore", help="make one shard's directory from a backup")
    restore.add_argument("backup", type=to_path, help="the --output of a backup")
    restore.add_argument("--data-dir", type=to_path, required=True, help="the shard's new directory, on a local disk")
    restore.add_argument("--shard", type=int, required=True, help="number of the shard, from 0")
    restore.add_argument("--num-shards", type=int, help="shards in the cluster (default as many as were backed up)")
    restore.set_defaults(run=_restore)

    reshard = commands.add_parser("reshard", help="make other shards from directories that nobody serves")
    reshard.add_argument("--source", type=to_path, nargs="+", required=True, help="the directories of all old shards")
    reshard.add_argument("--target", type=to_path, nargs="+", required=True, help="new ones, of shards 0, 1, ...")
    reshard.add_argument("--rows-per-block", type=int, help="of the new shards (default as before)")
    which = reshard.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint", type=non_empty_name, help="whose rows to take, and to keep (default the newest of all shards)"
    )
    which.add_argument("--current", action="store_true", help="take the rows of now, without any checkpoint")
    reshard.set_defaults(run=_reshard)

    compact = commands.add_parser("compact", help="copy a directory that nobody serves, without its free space")
    compact.add_argument("directory", type=to_path, help="the --data-dir of a shard")
    compact.add_argument("--output", type=to_path, required=True, help="a new directory")
    compact.set_defaults(run=_compact)

    planned = commands.add_parser("plan", help="tell the disk, memory and bandwidth that a run needs")
    planned.add_argument("--num-rows", type=int, required=True, help="N, the number of images")
    for name, what in (
        ("dim", "D, length of a row"),
        ("num-negatives", "K, active rows"),
        ("batch-size", "B, on all ranks together"),
        ("window-size", "W"),
        ("window-stride", "S"),
        ("rows-per-block", "rows stored together"),
        ("num-shards", "weight servers"),
        ("num-ranks", "trainers"),
        ("checkpoint-every", "E, steps between checkpoints, 0 for none"),
        ("keep-checkpoints", "c, checkpoints kept"),
    ):
        default = Workload.__dataclass_fields__[name.replace("-", "_")].default
        planned.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    planned.add_argument("--steps-per-second", type=float, default=1.0, help="of the trainer (default 1)")
    planned.add_argument("--steps", type=int, help="of the whole run (default those of one pass)")
    planned.add_argument("--json", action="store_true", help="print JSON")
    planned.set_defaults(run=_plan)

    extend = commands.add_parser("extend", help="make the table larger; whoever writes goes on")
    _add_addresses(extend)
    extend.add_argument("--num-rows", type=int, required=True, help="N, the rows that it is to have in all")
    extend.set_defaults(run=_extend)

    export = commands.add_parser("export", help="write rows, of now or of a checkpoint, to files")
    _add_addresses(export)
    add_export_options(export)
    export.set_defaults(run=_export)

    drop = commands.add_parser("drop", help="delete the table and all its rows")
    _add_addresses(drop)
    drop.add_argument("--yes", action="store_true", help="do it; without this, only say what would be deleted")
    drop.set_defaults(run=_drop)
    return parser


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("addresses", nargs="+", help="host:port of every shard")
    add_security_options(parser)


def _client(arguments: argparse.Namespace) -> WeightClient:
    return WeightClient(arguments.addresses, retry_seconds=10, **security_options(arguments).client_arguments())


def _serve(arguments: argparse.Namespace) -> None:
    from weightserver.server.process import ServerConfig, serve  # the other commands need neither LMDB nor a server

    names = ServerConfig.__dataclass_fields__
    serve(ServerConfig(**{name: getattr(arguments, name) for name in names}))


def _top(arguments: argparse.Namespace) -> None:
    from weightserver.operations.top import watch  # the other commands need no rich

    for address in arguments.addresses:
        split_address(address)
    watch(arguments.addresses, interval_seconds=arguments.interval_seconds, count=arguments.count)


def _certs(arguments: argparse.Namespace) -> None:
    from weightserver.operations.certificates import write_certificates  # the other commands make none

    directory = arguments.directory
    end = write_certificates(directory, arguments.host, days=arguments.days)
    print(
        f"certificates for {', '.join(arguments.host)} in {directory} hold until {end:%Y-%m-%d %H:%M} UTC\n"
        f"shards:  --tls-cert {directory}/server.pem --tls-key {directory}/server-key.pem "
        f"--token-file {directory}/token   (ask for client certificates: --tls-client-ca {directory}/ca.pem)\n"
        f"clients: --tls-ca {directory}/ca.pem --token-file {directory}/token   "
        f"(where asked: --tls-cert {directory}/client.pem --tls-key {directory}/client-key.pem)\n"
        f"keep {directory}/ca-key.pem away from both"
    )


def _health(arguments: argparse.Namespace) -> None:
    address = arguments.address
    split_address(address)
    if not 0 < arguments.timeout_seconds <= 3600:
        raise ValueError(f"--timeout-seconds must be positive and at most 3600, got {arguments.timeout_seconds}")
    credentials = security_options(arguments).credentials()
    with open_channel(address, credentials) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=arguments.timeout_seconds
            )
        except grpc.RpcError as error:
            if reason := tls_failure(address, error.code(), error.details() or "", tls=credentials is not None):
                raise AuthenticationError(f"{address} cannot be asked: {reason}") from None
            raise ShardUnavailableError(f"{address} does not answer ({error.code().name})") from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if arguments.data_dir is not None and (free := disk_usage(arguments.data_dir).free >> 20) < arguments.min_free_mib:
        raise StorageError(
            f"{address} is {status}, but the volume of {arguments.data_dir} is nearly full: {free} MiB are left, "
            f"{arguments.min_free_mib} should be; make room, or what does not fit will be refused"
        )
    print(status)
    if status != "SERVING":
        sys.exit(1)


def _inspect(arguments: argparse.Namespace) -> None:
    from weightserver.operations.inspect import inspect_directory

    print(json.dumps(inspect_directory(arguments.directory), indent=2))


def _verify(arguments: argparse.Namespace) -> None:
    from weightserver.operations.verify import verify_directory

    verdict = verify_directory(arguments.directory)
    for problem in verdict.problems:
        print(problem)
    print(f"{verdict.num_blocks} blocks, {verdict.num_versions} versions, {len(verdict.problems)} problems")
    if verdict.problems:
        sys.exit(1)


def _checkpoints(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        for checkpoint in client.checkpoints():
            name = checkpoint.name if checkpoint.name.isprintable() else repr(checkpoint.name)
            print(f"{name}\tstep {checkpoint.step}")


def _rollback(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        steps = {checkpoint.name: checkpoint.step for checkpoint in client.checkpoints()}
        if arguments.name not in steps:
            raise ValueError(f"no checkpoint {arguments.name!r} on all shards: 'weightserver checkpoints' lists them")
        step, info = steps[arguments.name], client.describe()
        if not arguments.yes:
            raise ValueError(f"this would undo run {info.run!r} from step {info.clock} to {step}: give --yes to do it")
        client.open_session(f"rollback to {arguments.name}"[:256], force=True)
        client.rollback(arguments.name)
        print(f"rolled back to step {step}")


def _release(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        if arguments.name in client.describe().checkpoint_names:
            client.join_newest_session()
        client.release(arguments.name)  # which says that there is none
        print(f"released {arguments.name}")


def _backup(arguments: argparse.Namespace) -> None:
    from weightserver.operations.backup import backup  # the other commands need no safetensors

    with _client(arguments) as client:
        made = backup(client, arguments.output, checkpoint=arguments.checkpoint)
    print(
        f"backed up {made.rows_stored} rows of checkpoint {made.checkpoint} (step {made.step}) of {len(made.shards)} "
        f"shards, {made.num_bytes} bytes, to {arguments.output}"
    )


def _restore(arguments: argparse.Namespace) -> None:
    from weightserver.operations.backup import restore

    made = restore(arguments.backup, arguments.data_dir, shard=arguments.shard, num_shards=arguments.num_shards)
    print(
        f"restored {made.shards[arguments.shard]['rows_stored']} rows of shard {arguments.shard} of {len(made.shards)} "
        f"to {arguments.data_dir}: checkpoint {made.checkpoint} (step {made.step})"
    )


def _reshard(arguments: argparse.Namespace) -> None:
    from weightserver.operations.reshard import reshard

    made = reshard(
        arguments.source,
        arguments.target,
        rows_per_block=arguments.rows_per_block,
        checkpoint=arguments.checkpoint,
        current=arguments.current,
    )
    what = f"checkpoint {made.checkpoint} (step {made.step})" if made.checkpoint else f"step {made.step}"
    print(
        f"{len(arguments.source)} shards became {len(arguments.target)} with {made.rows_stored} rows of {what}, "
        f"{made.spec.rows_per_block} in a block; {made.left_behind} later updates stay behind"
    )


def _compact(arguments: argparse.Namespace) -> None:
    from weightserver.operations.compact import compact

    compact(arguments.directory, arguments.output)
    before, after = (
        (directory / "data.mdb").stat().st_blocks * 512 for directory in (arguments.directory, arguments.output)
    )
    print(f"{arguments.directory} takes {before} bytes, {arguments.output} {after}")


def _plan(arguments: argparse.Namespace) -> None:
    parts = plan(Workload(**{name: getattr(arguments, name) for name in Workload.__dataclass_fields__}))
    if arguments.json:
        print(json.dumps({part: [asdict(figure) for figure in figures] for part, figures in parts.items()}, indent=2))
        return
    for part, figures in parts.items():
        print(part, *(f"  {figure}" for figure in figures), sep="\n")


def _extend(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        print(f"the table has {client.extend_table(arguments.num_rows).num_rows} rows")


def _export(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        written = export_rows(
            client,
            arguments.output,
            rows=arguments.rows,
            checkpoint=arguments.checkpoint,
            step=arguments.step,
            file_format=arguments.format,
        )
    print(f"wrote {len(written)} files to {arguments.output}")


def _drop(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        # A drop that ended halfway is repeated: some shards may hold no table any more.
        answers = [
            client.call_shard(shard, "Describe", pb.DescribeRequest()) for shard in range(len(arguments.addresses))
        ]
        holding = [answer for answer in answers if answer.HasField("spec")]
        if not holding:
            raise NoTableError("no shard holds a table: there is nothing to drop")
        run, clock = max(holding, key=lambda answer: answer.epoch).run, max(answer.clock for answer in holding)
        what = f"{sum(answer.rows_stored for answer in holding)} stored rows of run {run!r} at step {clock}"
        if lacking := ", ".join(str(answer.shard) for answer in answers if not answer.HasField("spec")):
            what += f" (shard {lacking} holds no table)"
        if not arguments.yes:
            raise ValueError(f"this would delete {what}: give --yes to do it")
        client.drop_table()
        print(f"deleted {what}")
