#!/usr/bin/env python3
"""Writes `expected.json`: what Jinja2 itself makes of `cases.json` and `snippets.json`.

    pip install jinja2
    python3 make_expected.py                  # rewrites expected.json
    python3 make_expected.py --transformers   # checks that transformers renders the same

The environment is set up as transformers sets up its own: sandbox, trimmed blocks, loop controls,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`, and a `generation` tag.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2025, 3, 9, 14, 5, 7)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def outcome(render):
    try:
        return {"text": render()}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"syntax_error": error.lineno}
    except Exception as error:  # the kind is Python's own; only a raised message is compared
        raised = type(error) is jinja2.exceptions.TemplateError
        return {"raised": str(error)} if raised else {"error": type(error).__name__}


def variables(case):
    return {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        **case.get("special_tokens", {}),
        **{key: case[key] for key in ("messages", "tools", "documents") if key in case},
        **case.get("kwargs", {}),
    }


def render_case(env, case):
    source = (HERE / "templates" / case["template"]).read_text()
    return env.from_string(source).render(**variables(case))


def check_transformers(cases, expected):
    import transformers.utils.chat_template_utils as utils

    for case in cases:
        source = (HERE / "templates" / case["template"]).read_text()
        compiled = utils._compile_jinja_template(source)
        compiled.environment.globals["strftime_now"] = NOW.strftime
        got = outcome(lambda: compiled.render(**variables(case)))
        assert got == expected[case["name"]], (case["name"], got, expected[case["name"]])
    print(f"transformers agrees on {len(cases)} cases")


def main():
    env = environment()
    cases = json.loads((HERE / "cases.json").read_text())
    snippets = json.loads((HERE / "snippets.json").read_text())
    expected = {
        "cases": {c["name"]: outcome(lambda: render_case(env, c)) for c in cases},
        "snippets": [
            outcome(lambda: env.from_string(s["template"]).render(**s.get("variables", {})))
            for s in snippets
        ],
    }
    if "--transformers" in sys.argv:
        check_transformers(cases, expected["cases"])
        return
    text = json.dumps(expected, ensure_ascii=False, indent=1)
    (HERE / "expected.json").write_text(text + "\n")
    for name, got in expected["cases"].items():
        if "error" in got or "syntax_error" in got:
            print("note:", name, got)


if __name__ == "__main__":
    main()
