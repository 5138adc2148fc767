"""`surefoot serve`: a model over HTTP until it is told to stop."""

from __future__ import annotations

import math
import socket
import sys

from surefoot.cli.options import ServeOptions
from surefoot.cli.session import load_engine
from surefoot.errors import InputError, shown
from surefoot.loading.checkpoint import find_model
from surefoot.loading.generation import sampling_defaults
from surefoot.sampling import require_int

MOST_PORT = 65535


def serve(options: ServeOptions) -> None:
    """Load the model and answer requests. On SIGTERM or ctrl-C, those that run are finished first, or cancelled after
    the time that there is for it."""
    require_int("--port", options.port, low=0, high=MOST_PORT)
    require_int("--queue-limit", options.queue_limit, low=0)
    require_int("--max-body", options.max_body, low=1)
    require_int("--prefix-cache", options.prefix_cache, low=0)
    if options.shutdown_timeout is not None and not 0 <= options.shutdown_timeout < math.inf:
        raise InputError(f"--shutdown-timeout: expected a number of at least 0, found {options.shutdown_timeout}")
    if options.generation_config not in ("auto", "none"):
        raise InputError(f"--generation-config: expected auto or none, found {shown(options.generation_config)}")
    listening = _listen(options.host, options.port)  # a port that is taken is known before the model is loaded
    with listening:
        sampling = sampling_defaults(find_model(options.model)) if options.generation_config == "auto" else {}
        engine = load_engine(options, options.slots)
        if sampling:
            listed = ", ".join(f"{name} {value}" for name, value in sampling.items())
            print(f"note: by generation_config.json, unless a request says otherwise: {listed}", file=sys.stderr)
        from surefoot.server.app import Settings, create_app
        from surefoot.server.board import log_to_stderr
        from surefoot.server.process import Server

        settings = Settings(
            options.name or options.model,
            api_keys=options.api_key or (),
            cors_origins=options.cors_origin or (),
            queue_limit=options.queue_limit,
            max_body=options.max_body,
            prefix_cache_bytes=options.prefix_cache,
            sampling=sampling,
            otel=options.otel,
        )
        app = create_app(engine, settings)
        log_to_stderr()
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"serving {settings.model} at http://{address}:{port}", file=sys.stderr, flush=True)
        Server(app, options.shutdown_timeout, log_level="warning").run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(f"--host, --port: expected a free address, found {host}:{port}: {error}") from error
