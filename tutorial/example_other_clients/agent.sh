#!/bin/sh
# A two-turn agent in a shell script: curl sends the requests, python3 writes and reads the JSON.
set -eu

ask() { # reads the messages so far from stdin, writes the text of the reply to stdout
    python3 -c 'import json, os, sys
print(json.dumps({"model": os.environ["MODEL"], "messages": json.load(sys.stdin)}))' |
        curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
            --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" --data @- |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
}

messages() { # pairs of role and text → JSON
    python3 -c 'import json, sys
given = sys.argv[1:]
print(json.dumps([{"role": r, "content": c} for r, c in zip(given[::2], given[1::2])]))' "$@"
}

thought=$(messages user "$QUESTION Think first." | ask)
messages user "$QUESTION Think first." assistant "$thought" user "Now the answer as \\boxed{number}." | ask | tr '\n' ' '
