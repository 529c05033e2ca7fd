from factpatch.cli import main

main()
