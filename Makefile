# `make` alone says what there is. Everything CI does is one of these targets.

VERSION := $(or $(shell git describe --tags --always --dirty 2>/dev/null),dev)
COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null)
# What is packed carries the date of the commit, so that it comes out the same anywhere.
export SOURCE_DATE_EPOCH := $(or $(shell git log -1 --format=%ct 2>/dev/null),0)

ARCHES := amd64 arm64 arm ppc64le s390x riscv64
OUT := dist/out
COMMANDS := ./cmd/flanneld ./cmd/flannelctl ./cmd/install-conf
# The CNI plugin is called what runtimes look for, and not as its folder.
PLUGIN := ./cmd/flannel-cni
LDFLAGS := -s -w -buildid= -X flanneld/pkg/version.Version=$(VERSION) -X flanneld/pkg/version.Commit=$(COMMIT)
GO_BUILD := CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'

# How long each fuzz target runs.
FUZZTIME ?= 10s
# Heavy components that tests run are built once for a user, outside the tree.
KUBE_VERSION := $(shell awk '$$1 == "k8s.io/kubernetes" { print $$2 }' test/components/kube-apiserver/go.mod)
HELM_VERSION := $(shell awk '$$1 == "helm.sh/helm/v3" { print $$2 }' test/components/helm/go.mod)
COMPONENTS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/flanneld
APISERVER := $(COMPONENTS)/kube-apiserver-$(KUBE_VERSION)
KUBECTL := $(COMPONENTS)/kubectl-$(KUBE_VERSION)
HELM := $(COMPONENTS)/helm-$(HELM_VERSION)
# Not go run: it would not pass on that it shall end.
STAGES := bin/tools/stages -fuzztime $(FUZZTIME)
GOLANGCI := bin/tools/golangci-lint

.DEFAULT_GOAL := help
.PHONY: help build demo test test-unit test-kernel test-e2e test-vm fuzz bench lint lint-go lint-mod lint-shell lint-sleep \
	lint-unit lint-rules fmt image chart dist dist-check deps components clean FORCE

help: ## this list
	@echo 'flanneld $(VERSION)'
	@echo
	@awk -F ':.*## ' '/^## / { print "\n" substr($$0, 4) } /^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Tests, the demo and deps need root. Nothing else has to be installed but Go, git and make.'

## See it work
build: ## bin/flanneld, bin/flannelctl and the small programs beside them, static
	$(GO_BUILD) -o bin/ $(COMMANDS)
	$(GO_BUILD) -o bin/flannel $(PLUGIN)

demo: build ## three hosts on this machine, a subnet each, every pod to every pod
	bin/flannelctl lab --hosts 3 --backend vxlan --once

## Test
test: deps components bin/tools/stages ## all stages, ending with a table of results and times
	@$(STAGES)

test-unit: deps components bin/tools/stages ## what needs no kernel, with the race detector
	@$(STAGES) unit

test-kernel: deps components bin/tools/stages ## the TestKernel... tests, in network namespaces of their own
	@$(STAGES) kernel

test-e2e: deps components bin/tools/stages ## real daemons, a real etcd and real traffic
	@$(STAGES) e2e

test-vm: deps bin/tools/stages ## the TestVM... tests, on a Debian kernel in qemu
	@$(STAGES) vm

fuzz: bin/tools/stages ## every fuzz target for FUZZTIME (10s)
	@$(STAGES) fuzz

bench: build deps components ## what the daemon costs, beside the kernel's own limit (an hour; QUICK=1: less, in minutes)
	go build -o bin/tools/bench ./test/bench
	bin/tools/bench $(if $(QUICK),-quick,-out Documentation/benchmarks -page Documentation/benchmarks.md) $(BENCHFLAGS)

bin/tools/stages: FORCE
	@go build -o $@ ./test/stages

## Keep it tidy
lint: lint-go lint-mod lint-shell lint-sleep lint-unit lint-rules ## all checks of code, modules, scripts and units

fmt: $(GOLANGCI) ## format the code
	$(GOLANGCI) fmt ./...

lint-go: $(GOLANGCI)
	go vet ./...
	$(GOLANGCI) run ./...

lint-mod:
	go mod tidy -diff
	go -C test/tools mod tidy -diff
	go -C test/components/kube-apiserver mod tidy -diff
	go -C test/components/helm mod tidy -diff
	go -C test/components/sbom mod tidy -diff
	go -C test/components/cni-plugins mod tidy -diff

lint-shell: deps
	shellcheck .ci/run dist/debian/postinst dist/debian/prerm dist/debian/postrm $(shell git ls-files --cached --others --exclude-standard '*.sh')

# In a synctest bubble sleeping is how time passes; elsewhere it makes tests slow and flaky.
lint-sleep:
	@files=$$(grep -rl --include='*_test.go' 'time\.Sleep(' . | xargs -r grep -L '"testing/synctest"'); \
	test -z "$$files" || { echo "tests that sleep (poll with a deadline, or use testing/synctest):" $$files; exit 1; }

# verify wants the program in place, which it is only where flanneld is installed.
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

# The linter is built from the module that pins it, and again when the pin changes.
$(GOLANGCI): test/tools/go.mod test/tools/go.sum
	go -C test/tools build -o $(CURDIR)/bin/tools/ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

## Hand it on
image: ## an OCI archive in dist/out, with buildah, podman or docker
	@test/tools/image.sh $(OUT)/flanneld-$(VERSION)-linux-$$(go env GOARCH).oci.tar flanneld:$(VERSION)

chart: bin/tools/helm ## the Helm chart as an archive in dist/out, for images of this version
	bin/tools/helm package dist/kubernetes/chart --app-version $(VERSION) --destination $(OUT)

dist: $(ARCHES:%=$(OUT)/flannel-$(VERSION)-linux-%.tar.gz) ## tarballs and Debian packages for all architectures in dist/out, reproducible
	cd $(OUT) && sha256sum $(^F) $(patsubst %.tar.gz,%.deb,$(^F)) > SHA256SUMS

# The package is made beside the tarball, of the same files.
$(OUT)/flannel-$(VERSION)-linux-%.tar.gz: FORCE bin/tools/sbom deps
	rm -rf $(OUT)/$* && mkdir -p $(OUT)/$*
	GOOS=linux GOARCH=$* GOARM=7 $(GO_BUILD) -o $(OUT)/$*/ $(COMMANDS)
	GOOS=linux GOARCH=$* GOARM=7 $(GO_BUILD) -o $(OUT)/$*/flannel $(PLUGIN)
	bin/tools/sbom $(VERSION) $(OUT)/$*/* > $(OUT)/$*.sbom && mv $(OUT)/$*.sbom $(OUT)/$*/sbom.cdx.json
	dist/debian/build.sh $(OUT)/$* $* $(VERSION) $(@:.tar.gz=.deb)
	cp -r README.md Documentation dist/mk-docker-opts.sh dist/systemd dist/rt_protos.d dist/prometheus dist/grafana $(OUT)/$*/
	rm $(OUT)/$*/Documentation/*.go
	cd dist && cp -r --parents kubernetes/base kubernetes/chart $(abspath $(OUT))/$*/
	cd $(OUT)/$* && tar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner \
		--mode=u=rwX,go=rX -cf - * | gzip -9n > ../$(@F)
	rm -rf $(OUT)/$*

dist-check: ## build the tarball of amd64 twice from nothing: the same bytes
	@test/tools/reproducible.sh amd64

bin/tools/sbom: test/components/sbom/go.mod test/components/sbom/main.go
	go build -C test/components/sbom -o $(CURDIR)/$@ .

components: bin/tools/kube-apiserver bin/tools/kubectl bin/tools/helm bin/tools/cni ## build the Kubernetes API server, tools and CNI plugins that tests run: minutes, the first time

# Plugins that know CNI 1.1, which those of Debian do not.
bin/tools/cni: test/components/cni-plugins/go.mod test/components/cni-plugins/go.sum
	@rm -rf $@.part && mkdir -p $@.part
	CGO_ENABLED=0 nice go build -C test/components/cni-plugins -trimpath -o $(CURDIR)/$@.part/ tool
	@rm -rf $@ && mv $@.part $@

# Each time: a version that was built earlier is not newer than the link.
bin/tools/kube-apiserver: $(APISERVER) FORCE
bin/tools/kubectl: $(KUBECTL) FORCE
bin/tools/helm: $(HELM) FORCE
bin/tools/kube-apiserver bin/tools/kubectl bin/tools/helm:
	@mkdir -p bin/tools && ln -sf $< $@

KUBE_BUILD = CGO_ENABLED=0 nice go build -trimpath -ldflags '-s -w \
	-X k8s.io/component-base/version.gitVersion=$(KUBE_VERSION) -X k8s.io/client-go/pkg/version.gitVersion=$(KUBE_VERSION)'

$(APISERVER):
	@mkdir -p $(COMPONENTS)
	@echo 'building kube-apiserver $(KUBE_VERSION), which takes minutes'
	cd test/components/kube-apiserver && $(KUBE_BUILD) -o $@.part .
	@mv $@.part $@

# After the API server, with which it shares most packages.
$(KUBECTL): | $(APISERVER)
	cd test/components/kube-apiserver && $(KUBE_BUILD) -o $@.part k8s.io/kubernetes/cmd/kubectl
	@mv $@.part $@

$(HELM):
	@mkdir -p $(COMPONENTS)
	cd test/components/helm && CGO_ENABLED=0 nice go build -trimpath -ldflags '-s -w' -o $@.part helm.sh/helm/v3/cmd/helm
	@mv $@.part $@

deps: ## install what tests and linters need, as root, if it is missing
	@test/tools/deps.sh

clean: ## remove what was built
	rm -rf bin $(OUT)
