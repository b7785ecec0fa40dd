from hpc_rl.cli import main

main()
