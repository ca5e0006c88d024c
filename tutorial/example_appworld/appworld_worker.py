"""One AppWorld task in a process of its own, driven by lines of JSON. Runs in AppWorld's Python, without ajet.

    python appworld_worker.py                 # requests on standard input, one answer line each on standard output
    python appworld_worker.py --task-ids dev  # prints the ids of a split as JSON

Requests: {"do": "open", "task_id": …}, {"do": "execute", "code": …}, {"do": "evaluate"}. An answer is {"ok": …} or
{"error": text}.
"""

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever AppWorld or the agent's code prints must not mix with the answers
    if sys.argv[1:2] == ["--task-ids"]:
        from appworld import load_task_ids

        answers.write(json.dumps(load_task_ids(sys.argv[2])) + "\n")
        answers.flush()
        return
    world = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                from appworld import AppWorld

                world = AppWorld(task_id=request["task_id"], experiment_name="ajet")
                person = world.task.supervisor
                names = ("first_name", "last_name", "email", "phone_number")
                about = {name: str(getattr(person, name, "")) for name in names}
                answer = {"instruction": world.task.instruction, "supervisor": about}
            elif world is None:
                raise RuntimeError("open a task first")
            elif request["do"] == "execute":
                output = world.execute(request["code"])
                answer = {"output": str(output), "completed": bool(world.task_completed())}
            else:
                found = world.evaluate().to_dict()
                answer = {"passed": len(found["passes"]), "failed": len(found["failures"])}
        except Exception as error:  # noqa: BLE001 - whatever AppWorld raises belongs to this episode
            reply = {"error": f"{type(error).__name__}: {error}"}
        else:
            reply = {"ok": answer}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
