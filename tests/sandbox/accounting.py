"""slurmdbd with a database that lives in the controller's own /tmp, so that `sacct` works."""

from tests.sandbox.config import Spec
from tests.sandbox.network import CONTROLLER

DATABASE = "/tmp/mariadb"  # inside the controller's mount namespace, where no other sandbox sees it


def slurmdbd_conf(spec: Spec, subnet: str) -> str:
    base = spec.base
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={base}/run/munge.socket",
        "DbdHost=ctl",
        f"DbdAddr={subnet}.{CONTROLLER}",
        "SlurmUser=root",
        f"PidFile={base}/run/slurmdbd.pid",
        f"LogFile={base}/log/slurmdbd.log",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",  # by TCP: an address in the controller's network namespace
        "StorageUser=root",
        "StorageLoc=slurm_acct_db",
    ]
    return "\n".join([*lines, ""])


def daemon_commands(spec: Spec, subnet: str) -> list[str]:
    """Shell commands for the controller, before slurmctld. The launcher's deadline covers the loops."""
    return [
        f"mkdir -p {DATABASE}",
        # No grant tables: the database holds nothing else, and its creation is most of the time that this takes.
        f"mariadbd --no-defaults --user=root --datadir={DATABASE} --socket={DATABASE}/socket --pid-file={DATABASE}/pid"
        " --bind-address=127.0.0.1 --skip-grant-tables --innodb-log-file-size=8M --innodb-buffer-pool-size=32M"
        f" --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF >>{spec.base}/log/mariadbd.log 2>&1 &",
        "until (: </dev/tcp/127.0.0.1/3306) 2>/dev/null; do sleep 0.1; done",
        "slurmdbd",
        f"until (: </dev/tcp/{subnet}.{CONTROLLER}/6819) 2>/dev/null; do sleep 0.1; done",
        f"sacctmgr --immediate add cluster {spec.name}",
    ]
