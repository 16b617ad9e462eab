"""`tunesmith schema`: the settings as JSON Schema, so that editors complete and check run.yaml."""

from __future__ import annotations


def command() -> None:
    """Print the JSON Schema of run.yaml, for editors.

    Editors that use yaml-language-server (VS Code, Neovim, ...) complete and check run.yaml after

        tunesmith schema > run.schema.json

    when the file begins with the line

        # yaml-language-server: $schema=run.schema.json
    """
    from tunesmith.cli.output import print_json, stage

    stage("Reading the settings")
    from tunesmith.config.schema import json_schema

    print_json(json_schema())
