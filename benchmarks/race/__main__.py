from benchmarks.race.main import main

main()
