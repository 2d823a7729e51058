"""An HTTP proxy on loopback that fails as networks do, in front of a server.

    with FaultProxy("http://127.0.0.1:5000", seed=0) as proxy:
        proxy.share = 0.2           every fifth request has a fault, one of `proxy.kinds`
        proxy.next = {"PUT": ["cut"]}      or: the next PUT has this one

slow          the answer takes a while
error         500 Internal Server Error, without reaching the server
busy          503 Slow Down, likewise
cut           the connection ends in the middle of the body: of the request, or else of the answer
wrong         a byte in the middle of the body is another: of the request, or else of the answer
"""

import random
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

KINDS = ("slow", "error", "busy", "cut")
ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>as planned</Message></Error>"


class FaultProxy:
    """The proxy; `url` is its own. `counts`: faults that happened, by kind."""

    def __init__(self, server: str, seed: int = 0):
        self.server, self.random = urlsplit(server), random.Random(seed)
        self.kinds, self.share = KINDS, 0.0
        self.next: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "FaultProxy":
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.http.shutdown()
        self.http.server_close()

    def fault(self, method: str, length: int) -> str | None:
        """The fault of a request with a body of `length` bytes."""
        with self.lock:
            fault = None
            if self.next.get(method) and length > 1000:
                fault = self.next[method].pop(0)
            elif self.random.random() < self.share:
                fault = self.random.choice(self.kinds)
            if fault:
                self.counts[fault] += 1
            return fault

    def handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args) -> None:
                pass

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                # of a GET the answer is what has a length
                fault = proxy.fault(self.command, length if self.command == "PUT" else 2**20)
                if fault == "cut" and length:
                    self.rfile.read(length // 2)
                    return self.end()
                body = self.body(length)
                if fault == "slow":
                    time.sleep(0.1)
                if fault in ("error", "busy"):
                    status, code = (
                        (500, b"InternalError") if fault == "error" else (503, b"SlowDown")
                    )
                    return self.reply(status, [], ERROR % code)
                if fault == "wrong" and body:
                    body, fault = flip(body), None
                connection = HTTPConnection(proxy.server.netloc, timeout=60)
                headers = {n: v for n, v in self.headers.items() if n != "Transfer-Encoding"}
                headers["Content-Length"] = str(len(body))
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                data = answer.read()
                connection.close()
                if fault == "wrong":
                    data = flip(data)
                self.reply(answer.status, answer.getheaders(), data, cut=fault == "cut")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def body(self, length: int) -> bytes:
                """The body of a request, of a known length or in chunks."""
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(length)
                chunks = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(chunks)

            def reply(self, status: int, headers, data: bytes, cut: bool = False) -> None:
                self.send_response_only(status)
                left_out = {"content-length", "transfer-encoding", "connection"}
                length = str(len(data))
                for name, value in headers:
                    if name.lower() == "content-length":
                        length = value  # of HEAD, which has no body
                    if name.lower() not in left_out:
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.end()

            def end(self) -> None:
                """End the connection without another word."""
                self.close_connection = True

        return Handler


def flip(data: bytes) -> bytes:
    """The data with one other bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data
