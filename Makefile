# Two commands are enough on a new Debian 12 or 13 machine:
#
#   make run            serves a disk, boots a real guest on it, and shows its I/O live
#   make run FOR=60     the same for 60 seconds, with a summary at the end
#   make run CLUSTER=1  the same with a Valkey cluster to which the disk's load is carried
#   make test           runs all tests, with real guests
#
# Each installs missing packages (and reports them). Further targets:
#
#   make build          the release binary, target/release/fathom
#   make install        installs it with its unit, manual and completions; DESTDIR= and PREFIX=/usr/local say where
#   make deb            Debian packages for this machine's suite, in target/deb
#   make check          formatting, lints and docs only
#   make unit           the tests without guests
#   make guests         the tests with guests
#   make pictures       makes docs/top.png with the program itself
#   make bench          the comparisons with other servers
#   make soak           longer tests: crash points, power losses, a guest whose pages leave, negative controls, kernels of all
#                       Debian suites, damaged guests' memory and pages of databases
#   make fuzz FOR=60    each fuzz target for 60 seconds (needs cargo-fuzz)

FOR ?=
DESTDIR ?=
PREFIX ?= /usr/local
CLUSTER ?=
CARGO := scripts/cargo
export CARGO_TERM_PROGRESS_WHEN ?= auto

.PHONY: run pictures test build install deb check unit guests soak bench fuzz clean

run:
	@scripts/install $(if $(CLUSTER),cluster,run)
	@scripts/build
	@scripts/guest
	@CLUSTER=$(CLUSTER) scripts/run $(FOR)

pictures:
	@scripts/install pictures
	@scripts/build
	@scripts/guest
	@scripts/pictures

test:
	@scripts/test

build:
	@scripts/install run
	$(CARGO) build --release --workspace --lib --bins --examples

# The program has to be there: an installation as root builds nothing.
install:
	@[ -x target/release/fathom ] || { echo "build it first, as yourself: make build"; exit 1; }
	@scripts/stage target/release/fathom "$(DESTDIR)" "$(PREFIX)"

deb:
	@scripts/install deb
	@scripts/deb

check:
	@scripts/test check

unit:
	@scripts/test unit

guests:
	@scripts/test guests

soak:
	@scripts/test soak

bench:
	@scripts/install bench
	$(CARGO) build --release --workspace --lib --bins --examples
	@bench/all

fuzz:
	@scripts/fuzz $(FOR)

clean:
	$(CARGO) clean
