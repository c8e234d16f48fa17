"""The command line of evaluations; parsing it loads no library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import tyro

from trainer.command_line import parsed_or_exit
from trainer.data.config import SourceOptions
from trainer.evaluate.options import EncoderOptions, EvaluationOptions
from trainer.evaluate.protocols import PROTOCOLS, Protocol
from trainer.settings import Settings, flag, set_help_texts
from weightserver.common.spelling import did_you_mean


class Command(NamedTuple):
    """A parsed command line."""

    name: str
    protocol: Protocol
    encoder: EncoderOptions
    options: EvaluationOptions
    settings: Settings
    reading: dict[str, Any]
    """The options that are given of how images are read, by name."""


def parse(
    arguments: Sequence[str], protocols: Mapping[str, Protocol] = PROTOCOLS, program: str = "trainer.evaluate"
) -> Command:
    """Parses a command line, PROTOCOL --OPTIONS; exits with status 2 if it is invalid.

    Raises:
        ValueError: options out of range.
    """
    name = arguments[0] if arguments else ""
    if name not in (*protocols, "-h", "--help", "--help-all"):
        others = "; detect and segment are of python -m experiments.paper" if protocols is PROTOCOLS else ""
        hint = f"give one of {', '.join(protocols)}{others}"
        if not name or name.startswith("-"):
            raise ValueError(f"the protocol is missing{' before the options' * bool(name)}: {hint}")
        raise ValueError(f"unknown protocol {name!r}: {did_you_mean(name, protocols, hint)}")
    parts = (EncoderOptions, EvaluationOptions, SourceOptions, *(type(one.settings) for one in protocols.values()))
    for settings in parts:
        set_help_texts(settings)

    def parse(options: list[str]) -> Command:
        parsed: Command = tyro.extras.subcommand_cli_from_dict(
            {name: _parsed_by(name, protocol) for name, protocol in protocols.items()},
            prog="pic evaluate" if program == "trainer.evaluate" else program,
            description="Evaluate an encoder, or raw pixels for comparison, on labelled images.",
            args=options,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        return parsed

    options = [one for settings in parts for one in fields(settings)]
    parsed = parsed_or_exit(parse, [name, *_without_commas(arguments[1:])], options, command=program)
    for part in (parsed.encoder, parsed.options, parsed.settings, SourceOptions(**parsed.reading)):
        part.check()
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return parsed._replace(reading={name: value for name, value in parsed.reading.items() if flag(name) in flags})


def _without_commas(arguments: Sequence[str]) -> list[str]:
    """Splits numbers that are separated by commas, --learning-rates 30,10,3, which tyro takes as separate arguments."""
    found = []
    for argument in arguments:
        name, is_assigned, numbers = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if re.fullmatch(r"[\d.eE+-]+(,[\d.eE+-]+)+", numbers):
            found += [name, *numbers.split(",")] if is_assigned else numbers.split(",")
        else:
            found.append(argument)
    return found


def _parsed_by(name: str, protocol: Protocol) -> Callable[..., Command]:
    def command(
        encoder: EncoderOptions, general: EvaluationOptions, reading: SourceOptions, settings: Any = protocol.settings
    ) -> Command:
        given = {one.name: getattr(reading, one.name) for one in fields(SourceOptions)}
        return Command(name, protocol, encoder, general, settings, given)

    command.__annotations__["settings"] = type(protocol.settings)
    command.__annotations__ |= {
        "encoder": EncoderOptions,
        "general": EvaluationOptions,
        "reading": SourceOptions,
    }  # not their names as text
    command.__doc__ = protocol.summary
    return command
