# SPDX-License-Identifier: Apache-2.0

# `make` without a target prints the list of targets. CI runs only these targets.

VERSION := $(or $(shell git describe --tags --always --dirty 2>/dev/null),dev)
COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null)
# go.mod has the path of the module. make module changes it everywhere else too.
MODULE := $(shell sed -n 's/^module //p' go.mod)
# Packed files get the date of the commit, so that packages are reproducible.
export SOURCE_DATE_EPOCH := $(or $(shell git log -1 --format=%ct 2>/dev/null),0)

# Archives of the same files are equal, wherever and whenever they are made.
TAR = tar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX

ARCHES := amd64 arm64 arm ppc64le s390x riscv64
OUT := dist/out
# The folder of the built programs. A test that builds them again names another one, because other
# tests may be starting the programs in bin.
BIN := bin
COMMANDS := ./cmd/flanneld ./cmd/flannelctl ./cmd/install-conf
# The CNI plugin has the name that container runtimes look for, not that of its folder.
PLUGIN := ./cmd/flannel-cni
# Not part of a release.
LAB := ./cmd/flannel-lab
LDFLAGS := -s -w -buildid= -X $(MODULE)/pkg/base/version.Version=$(VERSION) -X $(MODULE)/pkg/base/version.Commit=$(COMMIT)
# Programs are static. Tests and linters compile the same packages then, except for the race detector.
export CGO_ENABLED := 0
GO_BUILD := go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'
# All go commands get the same flags. So programs, tests and components share compiled packages, even
# if clones are in different folders. The compiler makes no debug information, which takes a tenth of
# its time. Releases drop it anyway. To debug a test, run go test without make. gRPC's tracing links
# html/template, which calls methods by name. So the linker could not drop a method of any type, which
# would make flannelctl larger by 9 MB.
export GOFLAGS := $(GOFLAGS) -trimpath -gcflags=all=-dwarf=false -tags=grpcnotrace

# How long each fuzz target runs.
FUZZTIME ?= 10s
# Large programs that tests need are built once per user, outside the tree.
KUBE_VERSION := $(shell awk '$$1 == "k8s.io/kubernetes" { print $$2 }' test/components/kube-apiserver/go.mod)
HELM_VERSION := $(shell awk '$$1 == "helm.sh/helm/v3" { print $$2 }' test/components/helm/go.mod)
COMPONENTS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/flanneld
APISERVER := $(COMPONENTS)/kube-apiserver-$(KUBE_VERSION)
KUBECTL := $(COMPONENTS)/kubectl-$(KUBE_VERSION)
HELM := $(COMPONENTS)/helm-$(HELM_VERSION)
# Its version includes the source, because the program changes with that too.
DOCKER_NETWORK := $(COMPONENTS)/docker-network-$(shell cat test/components/docker/go.mod test/components/docker/main.go | sha256sum | cut -c1-12)
# Older etcds that clusters still run, in the patch release that the module of each names.
etcd = $(COMPONENTS)/etcd-$(shell awk '$$1 == "go.etcd.io/etcd/server/v3" { print $$2 }' test/components/etcd-$(1)/go.mod)
# The programs of the nodes of test clusters, and Kubernetes' tests. The name contains a sum,
# because the result depends on several modules and files.
sum = $(shell cat $(1) | sha256sum | cut -c1-12)
NODES := $(COMPONENTS)/kubernetes-$(call sum,$(addprefix test/components/kube-apiserver/,go.mod dns/main.go conformance/conformance_test.go))
CONTAINERD := $(COMPONENTS)/containerd-$(call sum,test/components/containerd/go.mod)
# Not `go run`, which does not forward signals.
STAGES := bin/tools/stages -fuzztime $(FUZZTIME) $(if $(SHORT),-short)
# make test-e2e RUN=TestHealing runs one test. value, because a pattern may contain a dollar.
ONE = $(if $(RUN),-run '$(value RUN)')
GOLANGCI := bin/tools/golangci-lint

.DEFAULT_GOAL := help
.PHONY: help build module demo test test-unit test-kernel test-alone test-e2e test-vm test-kubernetes test-release test-cloud test-rest test-all fuzz bench storm lint lint-go lint-words lint-mod lint-shell lint-sleep lint-probes lint-license \
	lint-unit lint-rules fmt pages pictures image chart dist release release-key release-verify dist-check deps components components-short components-nodes upgrade walk clean FORCE

help: ## print this list
	@echo 'flanneld $(VERSION)'
	@echo
	@awk -F ':.*## ' '/^## / { print "\n" substr($$0, 4) } /^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Tests, demo and deps need root. You only have to install Go, git and make.'

## See it work
build: ## build bin/flanneld, bin/flannelctl and the other programs, all static
	$(GO_BUILD) -o $(BIN)/ $(COMMANDS) $(LAB)
	$(GO_BUILD) -o $(BIN)/flannel $(PLUGIN)

demo: build ## run three hosts on this machine and test every pod against every other
	bin/flannel-lab --hosts 3 --backend vxlan --once

## Test
test: deps components-short bin/tools/stages ## run the tests that show most in minutes, then print a table of results and times
	@$(STAGES) -part short

test-rest: deps components components-nodes bin/tools/stages ## run what make test leaves: everything else, including fuzzing and clusters of real kubelets (SHORT=1: long tests in a shorter form)
	@$(STAGES) -part rest

test-all: deps components components-nodes bin/tools/stages ## run make test and make test-rest in one
	@$(STAGES)

test-unit: deps components bin/tools/stages ## run tests that need no kernel, with the race detector (this and the next: RUN=TestName for one)
	@$(STAGES) $(ONE) unit

test-kernel: deps components bin/tools/stages ## run the TestKernel... tests, in network namespaces
	@$(STAGES) $(ONE) kernel

test-e2e: deps components bin/tools/stages ## run tests with real daemons, a real etcd and real traffic
	@$(STAGES) $(ONE) e2e

test-alone: deps components bin/tools/stages ## run the TestAlone... tests, which need the whole machine
	@$(STAGES) $(ONE) alone

test-vm: deps bin/tools/stages ## run the TestVM... tests, on Debian kernels in qemu
	@$(STAGES) $(ONE) vm

test-kubernetes: deps components components-nodes bin/tools/stages ## run Kubernetes' conformance tests in clusters of real kubelets (SHORT=1: some, in minutes)
	@$(STAGES) $(ONE) kubernetes

# moto implements EC2's protocol independently of this project. make cannot install it, so no stage runs it.
test-cloud: ## run the suite of clouds with aws-vpc and moto_server, an emulator of AWS that must be in PATH
	@command -v moto_server > /dev/null || { echo "test-cloud: moto_server is not in PATH: install it, for example by pip install 'moto[server]==5.2.1'"; exit 1; }
	CGO_ENABLED=1 go test -tags moto -race -count=1 -v -run '^TestMoto$$' ./backend/awsvpc

test-release: deps components bin/tools/stages ## build releases and check them (SHORT=1: for two architectures)
	@$(STAGES) $(ONE) release

fuzz: bin/tools/stages ## run every fuzz target for FUZZTIME (10s)
	@$(STAGES) fuzz

bench: build deps components ## measure the daemon and the kernel's own limit (an hour; with QUICK=1 some minutes)
	go build -o bin/tools/bench ./test/bench
	bin/tools/bench $(if $(QUICK),-quick,-out Documentation/internals/benchmarks -page Documentation/internals/benchmarks.md) $(BENCHFLAGS)

walk: build deps components-short ## change a network at random, and compare its hosts with new ones at the end (WALKFLAGS='-seed 7 -for 1h')
	go test -count=1 -timeout=0 -v -run '^TestWalks$$' ./test/e2e -args $(WALKFLAGS)

upgrade: build deps ## roll hosts under traffic from another version to this one, back, and forth again (FORMER=v1.0.0)
	git worktree add --force --detach bin/former $(FORMER) && go -C bin/former build -o ../former-flanneld ./cmd/flanneld && git worktree remove --force bin/former
	go test -count=1 -v -run '^TestRestartsUnderTraffic$$' ./test/e2e -args -former=$(CURDIR)/bin/former-flanneld

comma := ,
storm: deps components ## measure stores under thousands of hosts at once (half an hour, 12 GB of memory; with QUICK=1 some minutes)
	go build -o bin/tools/storm ./test/storm
	bin/tools/storm $(if $(QUICK),-n 200,-n 1000$(comma)5000 -kube-n 300$(comma)1000 -out Documentation/internals/storms -page Documentation/internals/storms.md) $(STORMFLAGS)

bin/tools/stages: FORCE
	@go build -o $@ ./test/stages

## Keep it tidy
lint: lint-go lint-words lint-mod lint-shell lint-sleep lint-probes lint-license lint-unit lint-rules ## check code, language, modules, scripts, licenses and units

pages: build deps components-short ## run the commands of the pages, and write what they print to the pages
	go test ./Documentation -update
	go test -count=1 ./test/e2e -run '^TestPage' -skip Kubernetes -args -update

pictures: build ## make the pictures of the pages again, from a running lab
	test/tools/pictures.sh Documentation/pictures

fmt: $(GOLANGCI) ## format the code
	$(GOLANGCI) fmt ./...

lint-go: $(GOLANGCI)
	go vet -tags moto,grpcnotrace ./...
	$(GOLANGCI) run ./...

# Forms that make comments and pages hard to understand. Documentation/contributing.md has the rules.
lint-words:
	go run ./test/words

lint-mod:
	go mod tidy -diff
	go -C test/tools mod tidy -diff
	go -C test/components/kube-apiserver mod tidy -diff
	go -C test/components/containerd mod tidy -diff
	go -C test/components/helm mod tidy -diff
	go -C test/components/sbom mod tidy -diff
	go -C test/components/packages mod tidy -diff
	go -C test/components/release mod tidy -diff
	go -C test/components/cni-plugins mod tidy -diff
	go -C test/components/ec2-metadata-mock mod tidy -diff
	go -C test/components/docker mod tidy -diff
	go -C test/components/etcd-3.5 mod tidy -diff
	go -C test/components/etcd-3.6 mod tidy -diff

lint-shell: deps
	shellcheck .ci/run dist/packages/postinst dist/packages/prerm dist/packages/postrm $(shell git ls-files --cached --others --exclude-standard '*.sh')

# In a synctest bubble a sleep only advances the fake clock. Elsewhere it makes tests slow
# and unreliable.
lint-sleep:
	@files=$$(grep -rl --include='*_test.go' 'time\.Sleep(' . | xargs -r grep -L '"testing/synctest"'); \
	test -z "$$files" || { echo "tests that sleep (poll with a deadline, or use testing/synctest):" $$files; exit 1; }

# The name and the comment of an interface tell a reader which types implement it and why others do not.
lint-probes:
	@probes=$$(grep -rnE --include='*.go' '(\.\(|\bcase )interface ?\{($$|[^}])' .); \
	test -z "$$probes" || { echo "type assertions to interfaces without names (declare the interface):"; echo "$$probes"; exit 1; }

lint-license:
	test/tools/license.sh

# systemd-analyze verify requires that the program exists, so replace its path.
lint-unit: deps
	@root=$$(mktemp -d) && trap 'rm -rf "$$root"' EXIT && \
	sed 's|^ExecStart=[^ ]*|ExecStart=/bin/true|' dist/systemd/flanneld.service > "$$root/flanneld.service" && \
	systemd-analyze verify --man=no "$$root/flanneld.service" && \
	{ systemd-analyze security --offline=true --threshold=30 --no-pager "$$root/flanneld.service" > "$$root/security" || \
	{ cat "$$root/security"; exit 1; }; } && \
	tail -n 1 "$$root/security"

lint-rules: deps
	promtool check rules dist/prometheus/flannel-rules.yml
	promtool test rules dist/prometheus/flannel-rules-test.yml

# The linter is built from the module that pins its version, and rebuilt when that changes.
$(GOLANGCI): test/tools/go.mod test/tools/go.sum
	go -C test/tools build -o $(CURDIR)/bin/tools/ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

# kubelet expands flanneld:<version> to this name, and finds the image by no other.
ARCHIVE = $(OUT)/flanneld-$(VERSION)-linux-$$(go env GOARCH).oci.tar

## Package it
image: build bin/tools/release bin/tools/sbom ## build an OCI archive for this machine's architecture in dist/out
	@test/tools/image.sh $(ARCHIVE) docker.io/library/flanneld:$(VERSION) $$(go env GOARCH)=$(BIN)

# helm stores the time of the build, and the archive must not contain it.
chart: bin/tools/helm ## build the archive of the Helm chart in dist/out, for images of this version
	@mkdir -p $(OUT)
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && \
	archive=$$(bin/tools/helm package dist/kubernetes/chart --app-version $(VERSION) --destination "$$work" | sed 's|.*/||') && \
	tar -xmzf "$$work/$$archive" -C "$$work" && \
	$(TAR) -C "$$work" -cf - flannel | gzip -9n > $(OUT)/$$archive && \
	echo "chart: $(OUT)/$$archive"

dist: $(ARCHES:%=$(OUT)/flannel-$(VERSION)-linux-%.tar.gz) ## build reproducible tarballs, .deb and .rpm packages for all architectures in dist/out
	cd $(OUT) && sha256sum $(foreach kind,tar.gz deb rpm,$(^F:tar.gz=$(kind))) > SHA256SUMS

# The packages are built from the same files as the tarball.
$(OUT)/flannel-$(VERSION)-linux-%.tar.gz: FORCE bin/tools/sbom bin/tools/packages
	rm -rf $(OUT)/$* && mkdir -p $(OUT)/$*
	GOOS=linux GOARCH=$* GOARM=7 $(GO_BUILD) -o $(OUT)/$*/ $(COMMANDS)
	GOOS=linux GOARCH=$* GOARM=7 $(GO_BUILD) -o $(OUT)/$*/flannel $(PLUGIN)
	bin/tools/sbom $(VERSION) $(OUT)/$*/* > $(OUT)/$*.sbom && mv $(OUT)/$*.sbom $(OUT)/$*/sbom.cdx.json
	dist/packages/build.sh $(OUT)/$* $* $(VERSION) $(@:.tar.gz=)
	cp -r README.md LICENSE SECURITY.md CHANGELOG.md CONTRIBUTING.md Documentation dist/mk-docker-opts.sh dist/systemd dist/rt_protos.d dist/prometheus dist/grafana $(OUT)/$*/
	rm $(OUT)/$*/Documentation/*.go
	cd dist && cp -r --parents kubernetes/base kubernetes/chart $(abspath $(OUT))/$*/
	cd $(OUT)/$* && $(TAR) -cf - * | gzip -n > ../$(@F)
	rm -rf $(OUT)/$*

# The URI of the machine or service that builds a release, for its statement of provenance.
export RELEASE_BUILDER ?= https://$(MODULE)/Documentation/releasing.md
export RELEASE_PUB ?= dist/release.pub
export RELEASE_KEY DEBIAN_SUITE DEBIAN_MIRROR

release: deps ## build and sign all files of a release in dist/out (RELEASE_KEY=release.key)
	@test/tools/release.sh $(OUT) $(VERSION) $(MODULE) $(ARCHES)

release-key: ## make a key pair for signing releases: release.key, which must stay secret, and dist/release.pub
	@test ! -e release.key || { echo 'release-key: release.key exists already'; exit 1; }
	@umask 077 && openssl genpkey -algorithm ed25519 -out release.key
	@openssl pkey -in release.key -pubout -out $(RELEASE_PUB)
	@echo 'release-key: move release.key to a safe place, and commit $(RELEASE_PUB)'

release-verify: bin/tools/release ## verify the signature and the files of the release in dist/out
	@bin/tools/release verify -key $(RELEASE_PUB) $(wildcard $(OUT)/*.intoto.json)

dist-check: ## build the tarball of amd64 twice and compare the bytes
	@test/tools/reproducible.sh amd64

# Without the commit in the program, one that exists and has not changed is not written again while
# a test starts it.
bin/tools/sbom bin/tools/release: bin/tools/%: test/components/%/go.mod FORCE
	@go build -C test/components/$* -buildvcs=false -o $(CURDIR)/$@ .

components-short: bin/tools/kube-apiserver bin/tools/cni # the part that make test needs

components: components-short bin/tools/kubectl bin/tools/helm bin/tools/docker-network bin/tools/etcd-3.5 bin/tools/etcd-3.6 bin/tools/ec2-metadata-mock bin/tools/release bin/tools/sbom bin/tools/packages ## build the Kubernetes API server, Docker's network, older etcds, tools and CNI plugins for tests (takes minutes the first time)

# Plugins that support CNI 1.1, unlike those of Debian.
bin/tools/cni: test/components/cni-plugins/go.mod test/components/cni-plugins/go.sum
# nfpm makes packages, and go-md2man their manual pages.
bin/tools/packages: test/components/packages/go.mod test/components/packages/go.sum
bin/tools/cni bin/tools/packages:
	@rm -rf $@.part && mkdir -p $@.part
	nice go build -C $(<D) -o $(CURDIR)/$@.part/ tool
	@rm -rf $@ && mv $@.part $@

# AWS's imitation of the metadata service of EC2.
bin/tools/ec2-metadata-mock: test/components/ec2-metadata-mock/go.mod test/components/ec2-metadata-mock/go.sum
	nice go build -C $(<D) -ldflags '-s -w' -o $(CURDIR)/$@.part tool
	@mv $@.part $@

# FORCE, because a version that was built earlier is not newer than the link.
bin/tools/kube-apiserver: $(APISERVER) FORCE
bin/tools/kubectl: $(KUBECTL) FORCE
bin/tools/helm: $(HELM) FORCE
bin/tools/docker-network: $(DOCKER_NETWORK) FORCE
bin/tools/etcd-3.5: $(call etcd,3.5) FORCE
bin/tools/etcd-3.6: $(call etcd,3.6) FORCE
bin/tools/kube-apiserver bin/tools/kubectl bin/tools/helm bin/tools/docker-network bin/tools/etcd-3.5 bin/tools/etcd-3.6:
	@mkdir -p bin/tools && ln -sf $< $@

# Two thirds of the compiler's time are for packages that only Kubernetes has. Without inlining, the
# compiler takes a third less time for them. The daemon shares these packages of k8s.io, so they are
# compiled as for the daemon, with all of k8s.io that they import.
SHARED := api/core/v1 apimachinery/... klog/... kube-openapi/... streaming/... utils/...
KUBE_BUILD = nice go build -gcflags='k8s.io/...=-dwarf=false -l' \
	$(SHARED:%=-gcflags=k8s.io/%=-dwarf=false) -ldflags '-s -w \
	-X k8s.io/component-base/version.gitVersion=$(KUBE_VERSION) -X k8s.io/client-go/pkg/version.gitVersion=$(KUBE_VERSION)'

$(APISERVER):
	@mkdir -p $(COMPONENTS)
	@echo 'building kube-apiserver $(KUBE_VERSION), which takes minutes'
	cd test/components/kube-apiserver && $(KUBE_BUILD) -o $@.part .
	@mv $@.part $@

# After the API server, because both share most packages.
$(KUBECTL): | $(APISERVER)
	cd test/components/kube-apiserver && $(KUBE_BUILD) -o $@.part k8s.io/kubernetes/cmd/kubectl
	@mv $@.part $@

$(HELM):
	@mkdir -p $(COMPONENTS)
	cd test/components/helm && nice go build -ldflags '-s -w' -o $@.part helm.sh/helm/v3/cmd/helm
	@mv $@.part $@

$(DOCKER_NETWORK):
	@mkdir -p $(COMPONENTS)
	cd test/components/docker && nice go build -ldflags '-s -w' -o $@.part .
	@mv $@.part $@

# etcd v3.5.1 is built from the module etcd-3.5.
$(COMPONENTS)/etcd-v%:
	@mkdir -p $(COMPONENTS)
	cd test/components/etcd-$(basename $*) && nice go build -ldflags '-s -w' -o $@.part go.etcd.io/etcd/server/v3
	@mv $@.part $@

components-nodes: bin/tools/kubernetes bin/tools/containerd ## build kubelet, containerd and others for make test-kubernetes: minutes, the first time

bin/tools/kubernetes: $(NODES) FORCE
bin/tools/containerd: $(CONTAINERD) FORCE
bin/tools/kubernetes bin/tools/containerd:
	@mkdir -p bin/tools && ln -sfn $< $@

# After the API server, because they share most packages with it. pause is a C program, and deps
# installs the compiler.
$(NODES): | $(APISERVER) deps
	@echo 'building kubelet $(KUBE_VERSION) and others, which takes minutes'
	@rm -rf $@.part && mkdir -p $@.part
	cd test/components/kube-apiserver && $(KUBE_BUILD) -o $@.part/ ./dns github.com/onsi/ginkgo/v2/ginkgo \
		$(addprefix k8s.io/kubernetes/,$(addprefix cmd/,kubelet kube-proxy kube-controller-manager kube-scheduler) test/images/agnhost)
	cd test/components/kube-apiserver && $(subst go build,go test -c -vet=off,$(KUBE_BUILD)) -o $@.part/conformance.test ./conformance
	module=$$(go -C test/components/kube-apiserver list -m -f '{{.Dir}}' k8s.io/kubernetes) && \
		gcc -static -Os -o $@.part/pause $$module/build/pause/linux/pause.c && \
		cp $$module/test/images/agnhost/porter/localhost.* $@.part/
	@rm -rf $@ && mv $@.part $@

$(CONTAINERD):
	@rm -rf $@.part && mkdir -p $@.part
	cd test/components/containerd && nice go build -ldflags '-s -w' -o $@.part/ tool
	@rm -rf $@ && mv $@.part $@

deps: ## install missing packages that tests and linters need, as root
	@test/tools/deps.sh

module: ## give the Go module another path, for a fork (NAME=example.org/you/flanneld)
	@test -n "$(NAME)" || { echo "make module: NAME is missing, for example NAME=example.org/you/flanneld"; exit 2; }
	git grep -lz '$(MODULE)' | xargs -0 sed -i 's|$(MODULE)|$(NAME)|g'

clean: ## remove the results of builds
	rm -rf bin $(OUT)
