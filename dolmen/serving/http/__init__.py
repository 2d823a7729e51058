"""OpenAI's API over HTTP (`dolmen serve`), on FastAPI and uvicorn.

app.py             endpoints, authentication, streams
protocol.py        requests and errors as data
request_parser.py  a request as the engine takes it
session.py         a request while it runs
responses.py       deltas of text, and responses in OpenAI's format
loop.py            the thread that steps the engine, and metrics
server.py          the life of the server, and limits of connections
"""
