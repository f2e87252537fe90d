"""Models of the hub (``hf://``), at the commit that they have at the start.

Its interface is asked by huggingface_hub, the files are read as those of any web server. The hub counts requests: 3,000
in five minutes without an account, of those that find out where a file is stored.

Reference: huggingface.co/docs/hub/rate-limits.
"""

from typing import Any

from quanterr.checkpoints.http_client import TIMEOUT, TOO_MANY, host_and_port, seconds_to_wait
from quanterr.checkpoints.http_store import Http
from quanterr.errors import CheckpointError, UsageError
from quanterr.util.text import display
from quanterr.util.waiting import Again, busy, retried, wait_for


class Hub(Http):
    """A model of the hub at one commit."""

    def __init__(self, model: str, revision: str | None) -> None:
        """Find the commit.

        Raises:
            CheckpointError: there is no such model, or it may not be read.
            UsageError: huggingface_hub is not installed.
        """
        try:
            from huggingface_hub import HfApi, hf_hub_url
            from huggingface_hub.errors import HfHubHTTPError
            from huggingface_hub.utils._headers import build_hf_headers
        except ImportError as error:
            raise UsageError('hf:// needs huggingface_hub: pip install "quanterr[remote]"') from error
        where = f"hf://{model}" + (f"@{revision}" if revision else "")
        api = HfApi()
        host = host_and_port(api.endpoint)

        def ask() -> Any:
            wait_for(host)
            try:
                return api.model_info(model, revision=revision, timeout=TIMEOUT)
            except HfHubHTTPError as error:
                status = getattr(error.response, "status_code", 0)
                if status in (401, 403, 404):
                    raise CheckpointError(
                        f"{display(where)}: not on the hub, or not permitted; if it is private or gated, log in with "
                        "`hf auth login`, or set HF_TOKEN"
                    ) from error
                if status in TOO_MANY:
                    raise busy(host, seconds_to_wait(error.response.headers), f"HTTP {status}") from error
                raise Again(f"HTTP {status}") from error
            except ValueError as error:
                raise CheckpointError(f"{display(where)}: {display(str(error), 200)}") from error
            except Exception as error:  # its client has errors of its own
                raise Again(display(str(error) or type(error).__name__, 200)) from error

        info = retried(where, ask)
        self.commit: str = info.sha
        self._files = sorted(sibling.rfilename for sibling in info.siblings)
        self._model = model
        base = hf_hub_url(model, "x", revision=info.sha).removesuffix("/x")
        super().__init__(base, {k: v for k, v in build_hf_headers().items() if isinstance(v, str)})

    def names(self, folder: str) -> list[str] | None:
        """Of the files at the commit."""
        prefix = f"{folder}/" if folder else ""
        inside = (name.removeprefix(prefix) for name in self._files if name.startswith(prefix))
        return [name for name in inside if "/" not in name]

    def shown(self, path: str) -> str:
        """``hf://org/model@commit/path``."""
        return f"hf://{self._model}@{self.commit}" + (f"/{path}" if path else "")
