"""Models on the Hugging Face hub (``hf://``), fixed at the commit that is current at the start.

huggingface_hub finds the commit; files are read as from any web server. The hub limits requests that resolve a file's
location: 3,000 in five minutes without an account.

Reference: huggingface.co/docs/hub/rate-limits.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from quanterr.checkpoints.http_client import BUSY_STATUSES, TIMEOUT, host_and_port, seconds_to_wait
from quanterr.checkpoints.http_store import Http
from quanterr.errors import CheckpointError, UsageError
from quanterr.util.text import display
from quanterr.util.waiting import RetryableError, handle_busy_host, retry, wait_for


class Hub(Http):
    """A model on the hub at one commit."""

    def __init__(self, model: str, revision: str | None) -> None:
        """Find the commit of a revision.

        Raises:
            CheckpointError: the model does not exist, or access is denied.
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

        def ask(revision: str | None, files_metadata: bool = False) -> Any:
            wait_for(host)
            try:
                return api.model_info(model, revision=revision, timeout=TIMEOUT, files_metadata=files_metadata)
            except HfHubHTTPError as error:
                status = getattr(error.response, "status_code", 0)
                if status in (401, 403, 404):
                    raise CheckpointError(
                        f"{display(where)}: not on the hub, or not permitted; if it is private or gated, log in with "
                        "`hf auth login`, or set HF_TOKEN"
                    ) from error
                if status in BUSY_STATUSES:
                    raise handle_busy_host(host, seconds_to_wait(error.response.headers), f"HTTP {status}") from error
                raise RetryableError(f"HTTP {status}") from error
            except ValueError as error:
                raise CheckpointError(f"{display(where)}: {display(str(error), 200)}") from error
            except Exception as error:  # the HTTP client of huggingface_hub raises its own errors
                raise RetryableError(display(str(error) or type(error).__name__, 200)) from error

        info = retry(where, partial(ask, revision))
        self.commit: str = info.sha
        self._ask_files: Callable[[], Any] = partial(retry, where, partial(ask, info.sha, files_metadata=True))
        self._files = sorted(sibling.rfilename for sibling in info.siblings)
        self._model = model
        base = hf_hub_url(model, "x", revision=info.sha).removesuffix("/x")
        super().__init__(base, {k: v for k, v in build_hf_headers().items() if isinstance(v, str)})

    def list_names(self, folder: str) -> list[str] | None:
        """Return the names of files in a folder at the commit."""
        prefix = f"{folder}/" if folder else ""
        inside = (name.removeprefix(prefix) for name in self._files if name.startswith(prefix))
        return [name for name in inside if "/" not in name]

    def sha256(self, path: str) -> str | None:
        """Return the SHA-256 of a file at the commit; None for a file that is not in LFS."""
        return self._checksums.get(path)

    @cached_property
    def _checksums(self) -> dict[str, str]:
        return {file.rfilename: file.lfs.sha256 for file in self._ask_files().siblings if file.lfs is not None}

    def show_address(self, path: str) -> str:
        """Return the address ``hf://org/model@commit/path``."""
        return f"hf://{self._model}@{self.commit}" + (f"/{path}" if path else "")
