"""A client program that drives a Tinker service through the public SDK and reports what it saw.

Owns: the steps, each with the SDK versions that have it; the checks of what comes back.
Never: imports Halteres: it runs inside the interpreter of whichever tinker SDK is on trial (0.3 to
the newest).

    cd tests/clients/sdk && TINKER_BASE_URL=... TINKER_API_KEY=tml-... PYTHON -m program --report
    FILE --model NAME
"""
