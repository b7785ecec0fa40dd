"""slurmdbd with a database that lives in the controller's own /tmp, so that `sacct` works."""

from tests.sandbox.network import CONTROLLER
from tests.sandbox.spec import Spec

DATABASE = "/tmp/mariadb"  # inside the controller's mount namespace, where no other sandbox sees it
SYSTEM_TABLES = "/usr/share/m*/m*_system_tables.sql"  # named after MySQL or MariaDB, by its version


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
    """Return the shell commands that the controller runs before slurmctld. The launcher's deadline covers the loops."""
    # No grant tables: creating them would take most of the start-up time, and the database holds nothing else.
    options = (
        f"--no-defaults --user=root --datadir={DATABASE} --skip-grant-tables --innodb-log-file-size=8M"
        " --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF"
    )
    network = f"--bind-address=127.0.0.1 --socket={DATABASE}/socket --pid-file={DATABASE}/pid"
    log = f">>{spec.base}/log/mariadbd.log 2>&1"
    return [
        f"mkdir -p {DATABASE}/mysql",
        # slurmdbd reads associations with a stored procedure, which needs the system tables.
        f"(echo 'USE mysql;'; cat {SYSTEM_TABLES}) | mariadbd {options} --bootstrap {log}",
        f"mariadbd {options} {network} {log} &",
        "until (: </dev/tcp/127.0.0.1/3306) 2>/dev/null; do sleep 0.1; done",
        "slurmdbd",
        f"until (: </dev/tcp/{subnet}.{CONTROLLER}/6819) 2>/dev/null; do sleep 0.1; done",
        f"sacctmgr --immediate add cluster {spec.name}",
        *_associations(spec),
    ]


def _associations(spec: Spec) -> list[str]:
    commands = []
    for account in dict.fromkeys(account for accounts in spec.accounts.values() for account in accounts):
        commands.append(f"sacctmgr --immediate add account {account} Cluster={spec.name}")
    if spec.qos:
        commands.append(f"sacctmgr --immediate add qos {','.join(spec.qos)}")
    for user, accounts in spec.accounts.items():
        which = f"Account={','.join(accounts)} DefaultAccount={accounts[0]} Cluster={spec.name}"
        commands.append(f"sacctmgr --immediate add user {user} {which}")
        if spec.qos:
            commands.append(f"sacctmgr --immediate modify user {user} set qos+={','.join(spec.qos)}")
    return commands
