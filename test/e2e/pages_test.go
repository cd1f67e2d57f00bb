// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// machine is a host with a root file system of its own: an overlay over that of the machine that
// runs the tests. So the commands of a page do not change the files of that machine.
type machine struct {
	*lab.Host
	t      *testing.T
	before []string // commands that set variables, which run before each later command
	// printed is the output of the last command, after page has replaced the names of the lab by those of
	// the page. page may be nil.
	printed string
	page    func(output string) string
}

const (
	machineRoot = "/run/machine/root"
	machineTree = "/tree" // the folder in which commands run; it contains bin and dist of this project
	machineLog  = "/var/log/flanneld"
)

const dockerDropIn = "/etc/systemd/system/docker.service.d/flannel.conf"

func newMachine(t *testing.T, h *lab.Host) *machine {
	t.Helper()
	tree, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	out, err := h.Exec(testContext(t), "sh", "-ec", `
		root=$1 tree=$2 from=$3
		mkdir -p $root $root/../upper $root/../work
		mount -t overlay machine -o lowerdir=/,upperdir=$root/../upper,workdir=$root/../work $root
		for d in /proc /sys /dev /var/lib/flannel; do mkdir -p $d $root$d; mount --bind $d $root$d; done
		mkdir -p $root/run/flannel /run/flannel
		mount --bind /run/flannel $root/run/flannel
		for d in bin dist; do mkdir -p $root$tree/$d; mount --bind $from/$d $root$tree/$d; done`, "sh", machineRoot, machineTree, tree)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return &machine{Host: h, t: t}
}

// run runs a command of a page on the machine, as it stands on the page, and returns the output.
// The test fails if the command fails.
func (m *machine) run(command string) string {
	m.t.Helper()
	out, err := m.Exec(testContext(m.t), "env", "FLANNELD_ETCD_ENDPOINTS="+m.EtcdEndpoint(), "ETCDCTL_ENDPOINTS="+m.EtcdEndpoint(),
		"PATH="+machineTree+"/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
		"chroot", machineRoot, "sh", "-ec", strings.Join(append(m.before, "cd "+machineTree, command), "\n"))
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	m.print(string(out))
	return string(out)
}

// print keeps the output of a command for followPage.
func (m *machine) print(output string) {
	m.printed = output
	if m.page != nil {
		m.printed = m.page(output)
	}
}

// runInShell runs a command as run does. If the command sets variables of the shell, later
// commands see them, too.
func (m *machine) runInShell(command string) {
	m.t.Helper()
	m.run(command)
	if strings.HasPrefix(command, ". ") || strings.HasPrefix(command, "export ") {
		m.before = append(m.before, command)
	}
}

// file returns the path by which tests reach the file with this path on the machine.
func (m *machine) file(name string) string { return m.Path(machineRoot + name) }

func (m *machine) write(name, text string) {
	m.t.Helper()
	err := os.MkdirAll(filepath.Dir(m.file(name)), 0o755) //nolint:gosec // as on a machine
	if err == nil {
		err = writeProgram(m.file(name), []byte(text), 0o755)
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

var (
	itemStart = regexp.MustCompile(`^(?:[0-9]+\.|-) `)
	prompted  = regexp.MustCompile(`^(?:\$|# (?:flannelctl|systemctl|ip)) `)
)

// indentedBlocks returns the indented blocks of a page. A block is a list of lines without
// indentation and without its empty lines. An indented line that continues a list item is not a
// block.
func indentedBlocks(text string) (blocks [][]string) {
	var block []string
	before, empty := "", 0
	for line := range strings.Lines(text + "end\n") {
		line = strings.TrimRight(line, "\n")
		shown, ok := strings.CutPrefix(line, "    ")
		switch {
		case line == "":
			empty++
			continue
		case ok && (block != nil || empty > 0 || !itemStart.MatchString(before)):
			block = append(block, strings.TrimSpace(shown))
		default:
			if block != nil {
				blocks = append(blocks, block)
			}
			block, before = nil, line
		}
		empty = 0
	}
	return blocks
}

// pageCommands returns the commands on a page, in order. If a block has lines with a prompt,
// these are its commands, without the prompt. Otherwise all of its lines are.
func pageCommands(t *testing.T, page string) (commands []string) {
	t.Helper()
	for _, e := range pageExamples(t, page) {
		commands = append(commands, e.command)
	}
	return commands
}

// pageExamples returns the commands that pageCommands returns, with the output below each that has a
// prompt.
func pageExamples(t *testing.T, page string) (examples []example) {
	t.Helper()
	raw, err := os.ReadFile("../../Documentation/" + page)
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range indentedBlocks(string(raw)) {
		prompt := slices.ContainsFunc(block, prompted.MatchString)
		for _, line := range block {
			switch {
			case prompted.MatchString(line):
				examples = append(examples, example{page: page, command: line[len("$ "):], number: len(examples)})
			case !prompt:
				examples = append(examples, example{page: page, command: line, number: len(examples)})
			case len(examples) > 0:
				last := &examples[len(examples)-1]
				last.output += line + "\n"
			}
		}
	}
	return examples
}

// pageBlock returns the first block of a page that begins with the text begins, up to an empty
// line and without indentation. The test fails if there is no such block.
func pageBlock(t *testing.T, page, begins string) string {
	t.Helper()
	raw, err := os.ReadFile("../../Documentation/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(raw), "\n\n    "+begins)
	if !ok {
		t.Fatalf("%s contains no block that begins with %s", page, begins)
	}
	block, _, _ := strings.Cut(rest, "\n\n")
	return begins + strings.ReplaceAll(block, "\n    ", "\n")
}

// followPage runs all commands of a page on the machines, each command on all machines before the
// next. If a command begins with keys of special, followPage does not run it, but calls the
// function of the longest such key. This is for commands that need systemd, for example, and for
// lines that are output and no command. The test fails if no command begins with one of the keys, or if a
// machine prints something else than the page shows.
func followPage(t *testing.T, page string, machines []*machine, special map[string]func(m *machine, command string)) {
	t.Helper()
	examples := pageExamples(t, page)
	if len(examples) == 0 {
		t.Fatalf("%s contains no command", page)
	}
	used := map[string]bool{}
	for _, e := range examples {
		key, command := "", e.command
		for k := range special {
			if strings.HasPrefix(command, k) && len(k) > len(key) {
				key = k
			}
		}
		used[key] = true
		for _, m := range machines {
			m.printed = ""
			if key == "" {
				m.runInShell(command)
			} else {
				special[key](m, command)
			}
			e.expect(t, m.printed)
		}
	}
	for k := range special {
		if !used[k] {
			t.Errorf("%s does not contain the command %s", page, k)
		}
	}
}

// TestPageGettingStarted runs the commands of getting-started.md on two hosts, from the
// installation to a ping between their pods.
func TestPageGettingStarted(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, "")
	a, b := newMachine(t, l.Host(1)), newMachine(t, l.Host(2))
	const settings = "/etc/flannel/flanneld.env"
	nothing := func(*machine, string) {}
	a.page, b.page = asOnPage(a, b), asOnPage(a, b)
	followPage(t, "getting-started.md", []*machine{a, b}, map[string]func(*machine, string){
		// These do not run, because etcd runs already and bin is built.
		"make build": nothing, "ETCD_LISTEN_CLIENT_URLS=": nothing, "ETCD_ADVERTISE_CLIENT_URLS=": nothing, "systemctl restart etcd": nothing,
		"etcdctl put": func(m *machine, command string) {
			if m == a {
				m.run(command)
			}
		},
		"FLANNELD_": func(m *machine, line string) {
			m.run(fmt.Sprintf("echo '%s' >>%s", strings.ReplaceAll(line, "http://192.0.2.11:2379", m.EtcdEndpoint()), settings))
		},
		"systemctl daemon-reload": func(m *machine, _ string) { m.run("systemd-analyze verify --man=no flanneld.service") },
		"systemctl enable --now flanneld": func(m *machine, _ string) {
			m.enable("/usr/local/bin/flanneld", settings)
			eventually(t, "flanneld is ready", func() error {
				_, err := m.Exec(testContext(t), "curl", "-sSf", "http://127.0.0.1:8471/readyz")
				return err
			})
		},
		"journalctl": func(m *machine, _ string) { // reads the log file, because there is no journal
			log, err := os.ReadFile(m.file(machineLog))
			if err != nil {
				t.Fatal(err)
			}
			until, _, _ := strings.Cut(string(log), `"flannel is ready"`)
			m.print(until + "\"flannel is ready\"\n")
		},
		"ip route": func(m *machine, command string) {
			eventually(t, "a route to the other host", func() error {
				if out := m.run(command); !strings.Contains(out, "dev flannel.1 proto flannel onlink") {
					return errors.New(out)
				}
				return nil
			})
		},
		"ip netns exec pod ping -c 3 10.5.43.2": func(m *machine, command string) {
			if m == a {
				pod := strings.TrimSpace(b.run(`echo "${FLANNEL_SUBNET%.*}.2"`))
				m.run(strings.Replace(command, "10.5.43.2", pod, 1))
			}
		},
		// The store has another address here, and the files of the machine stay.
		"bin/flannelctl doctor --preflight": nothing, "echo net.ipv4.ip_forward=1": nothing,
	})
}

// asOnPage returns a function that replaces the addresses and subnets of two hosts by those of host a and
// host b on the page.
func asOnPage(a, b *machine) func(output string) string {
	return func(output string) string {
		pairs := []string{
			a.EtcdEndpoint(), "http://192.0.2.11:2379", b.EtcdEndpoint(), "http://192.0.2.11:2379",
			"192.168.77.254", "192.0.2.1", "192.168.77.0", "192.0.2.0", // before those that are shorter
			a.Addr(v4[0]).String(), "192.0.2.11", b.Addr(v4[0]).String(), "192.0.2.12",
		}
		for m, subnet := range map[*machine]string{a: "10.5.49.", b: "10.5.43."} {
			env, _ := os.ReadFile(m.Path(lab.SubnetFile)) // missing before the daemon is ready
			if found := regexp.MustCompile(`SUBNET=(10\.5\.\d+\.)`).FindSubmatch(env); found != nil {
				pairs = append(pairs, string(found[1]), subnet)
			}
		}
		return strings.NewReplacer(pairs...).Replace(output)
	}
}

// enable starts a program as its systemd unit would, and stops it when the test ends. settings is
// the path of a file with its variables. The log is in machineLog.
func (m *machine) enable(program, settings string) {
	m.t.Helper()
	cmd := exec.Command("chroot", machineRoot, program)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	for line := range strings.Lines(m.run("cat " + settings)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			cmd.Env = append(cmd.Env, line)
		}
	}
	m.write(machineLog, "")
	log, err := os.OpenFile(m.file(machineLog), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		m.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	cmd.Stderr = log
	if err := m.Start(cmd); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			m.t.Errorf("%s: %v", program, err)
		}
		if err := cmd.Wait(); err != nil {
			m.t.Errorf("%s: %v", program, err)
		}
	})
}

// TestPageEtcd runs the commands of etcd.md on hosts of two labs. Some
// commands switch on authentication in the store of the first lab. The store of the second lab
// requires client certificates.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPageEtcd(t *testing.T) {
	t.Parallel()
	const program, settings = "/usr/local/bin/flanneld", "/etc/flannel/flanneld.env"
	open := newLab(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	closed := newLab(t, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{TLS: true, ClientCerts: true}}, `{"Type":"vxlan"}`)
	for _, h := range open.Hosts()[:2] {
		startOne(t, h, lab.FlanneldOptions{})
	}
	own := statusOf(t, open.Host(1)).Lease.Key
	_, reserved := freeSubnet(t, open.Hosts()[:2]...)
	first, late, guarded := newMachine(t, open.Host(1)), newMachine(t, open.Host(3)), newMachine(t, closed.Host(1))
	for _, m := range []*machine{late, guarded} {
		m.run("install -D -m 0755 bin/flanneld " + program + " && install -D -m 0600 /dev/null " + settings)
	}
	set := func(m *machine, line string) { m.run("echo '" + line + "' >>" + settings) }
	secrets := map[string]string{
		"/etc/flannel/etcd-ca.pem": closed.Etcd().TLSFiles().CA, "/etc/flannel/etcd.pem": closed.Etcd().TLSFiles().ClientCert,
		"/etc/flannel/etcd-key.pem": closed.Etcd().TLSFiles().ClientKey,
	}
	seen := func(*machine, string) {}
	guardedBy := func(_ *machine, line string) {
		_, path, _ := strings.Cut(line, "=")
		raw, err := os.ReadFile(secrets[path])
		if err != nil {
			t.Fatal(err)
		}
		guarded.write(path, string(raw))
		guarded.run("chown root: " + path + " && chmod 0600 " + path)
		set(guarded, line)
	}
	followPage(t, "etcd.md", []*machine{first}, map[string]func(*machine, string){
		"I1121": seen, "E1121": seen, "etcd grpc-proxy": seen,
		"etcdctl get": func(m *machine, command string) {
			out := m.run(strings.Replace(command, "10.5.43.0-24", own, 1))
			if !strings.Contains(out, own+"\n{") || !strings.Contains(out, `"BackendType":"vxlan"`) {
				t.Errorf("%s: %s", command, out)
			}
		},
		"etcdctl lease timetolive": func(m *machine, command string) {
			id := strings.Fields(m.run("etcdctl lease list | grep -v found"))[0]
			if out := m.run(strings.Replace(command, "694da1fc3657d90c", id, 1)); !strings.Contains(out, "granted with TTL(86400s)") || !strings.Contains(out, lab.Prefix+"/subnets/10.5.") {
				t.Errorf("%s: %s", command, out)
			}
		},
		"etcdctl put": func(m *machine, command string) {
			m.run(strings.NewReplacer("192.0.2.12", late.Addr(v4[0]).String(), "10.5.77.0-24", reserved).Replace(command))
		},
		"FLANNELD_ETCD_ENDPOINTS=": func(_ *machine, line string) {
			set(guarded, strings.Replace(line, "https://192.0.2.11:2379", closed.Host(1).EtcdEndpoint(), 1))
		},
		"FLANNELD_ETCD_CAFILE=": guardedBy, "FLANNELD_ETCD_CERTFILE=": guardedBy, "FLANNELD_ETCD_KEYFILE=": guardedBy,
		"flannelctl roles": func(m *machine, command string) {
			m.run("FLANNELD_ETCD_USERNAME=root FLANNELD_ETCD_PASSWORD=rootpw " + command)
		},
		"FLANNELD_ETCD_USERNAME=": func(_ *machine, line string) { set(late, line) },
		"FLANNELD_ETCD_PASSWORD=": func(_ *machine, line string) { set(late, line) },
	})
	if out, err := first.Exec(testContext(t), "etcdctl", "--endpoints", first.EtcdEndpoint(), "get", "--prefix", lab.Prefix); err == nil {
		t.Errorf("a client without a user can read the store: %s", out)
	}
	set(late, "FLANNELD_ETCD_ENDPOINTS="+late.EtcdEndpoint())
	for _, m := range []*machine{late, guarded} {
		set(m, "FLANNELD_HEALTHZ_PORT=8471")
		m.enable(program, settings)
		eventually(t, "flanneld is ready", func() error {
			_, err := m.Exec(testContext(t), "curl", "-sSf", "http://127.0.0.1:8471/readyz")
			return err
		})
	}
	if out := late.run("cat /run/flannel/subnet.env"); !strings.Contains(out, "FLANNEL_SUBNET="+strings.Replace(reserved, "0-", "1/", 1)) {
		t.Errorf("the host does not have the subnet that was reserved as %s: %s", reserved, out)
	}
}

// TestPageMigration runs the commands of migration.md on two hosts, one after the other. Before
// the migration a flanneld runs under the name that flannel has on the page. The test stops and
// starts the daemons in the place of systemd.
//
//stages:rest TestFlannelctlMigrate runs most commands of the page
func TestPageMigration(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	const program = "/opt/bin/flanneld"
	old, err := os.ReadFile("../../bin/flanneld")
	if err != nil {
		t.Fatal(err)
	}
	unit := func(m *machine) lab.FlanneldOptions { return lab.FlanneldOptions{Path: m.file(program)} }
	var machines []*machine
	for _, h := range l.Hosts() {
		m := newMachine(t, h)
		m.write(program, string(old))
		if err := os.Chmod(m.file(program), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		startOne(t, h, unit(m))
		machines = append(machines, m)
	}
	for _, m := range machines {
		followPage(t, "migration.md", []*machine{m}, map[string]func(*machine, string){
			"systemctl stop flannel": func(m *machine, _ string) { expectStop(t, m.Daemon()) },
			"systemctl start flannel": func(m *machine, _ string) {
				if info, err := os.Stat(m.file(program)); err != nil || info.Mode().Perm() != 0o755 {
					t.Errorf("%s is not the new program: %v", program, err)
				}
				startOne(t, m.Host, unit(m))
			},
		})
		m.run("curl -sS --fail http://127.0.0.1:8081/readyz")
	}
	expectPeersProgrammed(t, l)
}

// TestPagesAboutAHost runs the commands of troubleshooting.md, backends/vxlan.md and operations.md on a
// host that works.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPagesAboutAHost(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	m := newMachine(t, l.Host(1))
	shown := func(*machine, string) {} // for lines that are not run: output, configuration and a command of the lab
	followPage(t, "troubleshooting.md", []*machine{m}, nil)
	followPage(t, "backends/vxlan.md", []*machine{m}, map[string]func(*machine, string){
		`{"VNI"`: shown, "E1121": shown, "bin/flannel-lab": shown,
		"ip route show proto flannel": func(m *machine, command string) {
			m.run("install -D dist/rt_protos.d/flannel.conf /etc/iproute2/rt_protos.d/flannel.conf")
			if out := m.run(command); !strings.Contains(out, "dev flannel.1 onlink") {
				t.Errorf("%s: %s", command, out)
			}
		},
	})
	m.run("install -D -m 0644 dist/systemd/docker-flannel.conf " + dockerDropIn)
	gone := func(m *machine, _ string) { m.run("test ! -e " + dockerDropIn) }
	followPage(t, "operations.md", []*machine{m}, map[string]func(*machine, string){
		"systemctl daemon-reload": gone, "FLANNEL_": shown, "I1121": shown, "E1121": shown,
		"curl -s": func(m *machine, command string) {
			m.run(strings.Replace(command, "8471", "8081", 1))
			m.printed = "" // on the page the daemon is not ready
		},
		"systemd-analyze security flanneld": func(m *machine, command string) {
			m.run(strings.Replace(command, "flanneld", "--offline=true dist/systemd/flanneld.service", 1) + " | grep ' 2.4 OK'")
			m.printed = "" // systemd's face depends on the terminal
		},
		"systemctl restart flanneld": func(m *machine, _ string) {
			expectStop(t, m.Daemon())
			startOne(t, m.Host, lab.FlanneldOptions{Path: m.file("/usr/local/bin/flanneld")})
		},
		"systemctl disable --now flanneld": func(m *machine, command string) {
			gone(m, command)
			expectStop(t, m.Daemon())
		},
		"flanneld --etcd-prefix=": func(m *machine, command string) { tryTwice(t, m, strings.Fields(command)[1:]) },
	})
	if left := m.run("ip -o link"); strings.Contains(left, "flannel") {
		t.Errorf("links after the removal: %s, want none of flannel's", left)
	}
}

// TestPagesWithOutputs runs commands whose output is on a page: that of cni.md on a host without a subnet, those of
// lab.md and flags.md, and that of interface.md when another program has taken over the default route.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPagesWithOutputs(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	m := newMachine(t, l.Host(1))
	ran := 0
	show := func(page string) {
		t.Helper()
		for _, e := range pageExamples(t, page) {
			if e.output != "" {
				e.expect(t, m.run(inHost.ReplaceAllString(e.command, "")+" || true"))
				ran++
			}
		}
	}
	show("cni.md")
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	show("lab.md")
	show("flags.md")

	shell(t, m.Namespace, `ip link add tun0 up type vxlan id 7 dstport 4789 dev eth0 && ip addr add 10.8.0.6/24 dev tun0
		ip route add default via 192.168.77.254 dev eth0 metric 100 && ip route replace default dev tun0`)
	eventually(t, "the default route of tun0", func() error {
		if out := m.run("flannelctl interface"); strings.Count(out, "default route in the main table") != 1 || !strings.Contains(out, "no default route that is the best one") {
			return errors.New(out)
		}
		return nil
	})
	show("interface.md")
	if ran < 10 {
		t.Errorf("the pages have %d commands with outputs, want at least 10", ran)
	}
}

// inHost matches the start of a command that runs the rest in a host of the lab.
var inHost = regexp.MustCompile(`^nsenter -t \d+ -n -m `)

// TestPageStatus runs the commands of status.md on a host with a configuration that its daemon cannot use, and
// then with one that it does not follow.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPageStatus(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	m := newMachine(t, l.Host(1))
	configured := func(backend, line string) {
		t.Helper()
		putConfig(t, l, backend)
		eventually(t, line, func() error {
			if out := m.run("flannelctl status || true"); !strings.Contains(out, line) {
				return errors.New(out)
			}
			return nil
		})
	}

	restarted := false
	followPage(t, "status.md", []*machine{m}, map[string]func(*machine, string){
		"flannelctl status": func(m *machine, command string) {
			if !restarted {
				configured(`{"Type":"vxlam"}`, "configuration rejected")
				m.run(command)
				putConfig(t, l, `{"Type":"vxlan"}`)
				expectStop(t, m.Daemon())
				startOne(t, m.Host, lab.FlanneldOptions{Args: []string{"--follow-config=false"}})
				restarted = true
				return
			}
			configured(`{"Type":"vxlan","VNI":7}`, "restart needed")
			m.run(command)
		},
	})
}

// TestPagePaths runs the commands of paths.md on a host to which the path of one peer is broken, and that of the other
// is narrow.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPagePaths(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 3}, probing(t, "vxlan"))
	m := newMachine(t, l.Host(1))
	for i, subnet := range []string{"10.5.126.0/24", "10.5.145.0/24", "10.5.173.0/24"} { // the table of the page is in this order
		m.run("flannelctl reserve " + subnet + " " + l.Host(i+1).Addr(v4[0]).String())
	}
	startAll(t, l, lab.FlanneldOptions{Args: meshArgs})
	for i, rule := range []string{"ip saddr 192.168.77.2 udp dport 8472", "ip saddr 192.168.77.1 udp dport 8472", "meta length > 1300"} {
		nft(t, l.Host(i+1).Namespace, "table netdev broken { chain in { type filter hook ingress device eth0 priority 0; "+rule+" drop ; } ; }")
	}

	until := func(text string) func(*machine, string) {
		return func(m *machine, command string) {
			eventually(t, command+" prints "+text, func() error {
				if out := m.run(command + " || true"); !strings.Contains(out, text) {
					return errors.New(out)
				}
				return nil
			})
		}
	}
	elsewhere := func(*machine, string) {}
	followPage(t, "paths.md", []*machine{m}, map[string]func(*machine, string){
		`{"Network"`: elsewhere, "flannelctl mesh --kubeconfig-file": elsewhere,
		"flannelctl status": until("1 network, 1 ok"), "ip route show": until("mtu 1250"), "flannelctl mesh": until("4 ok, 2 broken, 0 unknown"),
	})

	// The daemon of the last host is away for a while. Hosts without a lease take a minute to be gone: a unit test has them.
	const away = "10.5.173.0/24"
	expectLine := watchFlannelctl(t, m.Host, "mesh", "-w", "--interval=1s")
	expectLine("=", "4 ok, 2 broken, 0 unknown")
	expectStop(t, l.Host(3).Daemon())
	expectLine("!", away, "nothing is known: "+l.Host(3).Addr(v4[0]).String()+":8287 refuses the connection: start flanneld with --statusz-address")
	expectFlannelctlFails(t, m.Host, []string{"mesh"}, "nothing is known from "+away)
	start(t, l.Host(3), lab.FlanneldOptions{Args: meshArgs})
	expectLine("+", away, "ok")
}

// TestPageFlannelctl runs the commands of flannelctl.md on a host whose only peer is behind a firewall, and has a
// reserved subnet. A third host has no daemon.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPageFlannelctl(t *testing.T) {
	t.Parallel()
	const config = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"%s}}`
	l := newLab(t, lab.Config{Hosts: 3, Network: fmt.Appendf(nil, config, "")}, "")
	m, fresh := newMachine(t, l.Host(1)), newMachine(t, l.Host(3))
	machineName, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	m.page = func(output string) string { return strings.ReplaceAll(output, "-"+machineName+"-", "-host1-") }
	m.write(machineTree+"/net-conf.json", fmt.Sprintf(config, `,"Port":4789`))
	m.run("flannelctl reserve 10.5.77.0/24 " + l.Host(2).Addr(v4[0]).String())
	for _, h := range l.Hosts()[:2] {
		startOne(t, h, lab.FlanneldOptions{})
	}
	shell(t, l.Host(2).Namespace, "iptables -I INPUT -p udp --dport 8472 -j DROP")
	shell(t, fresh.Namespace, "ip link add virbr0 up type bridge && ip route add 10.5.7.0/24 dev virbr0")

	fails := func(m *machine, command string) { m.run(command + " || true") }
	elsewhere := func(*machine, string) {} // other tests run these: on Kubernetes, and with plugins (TestCheckFromPod)
	followPage(t, "flannelctl.md", []*machine{m}, map[string]func(*machine, string){
		"flannelctl leases --context": elsewhere, "flannelctl config validate": elsewhere,
		"kubectl":                elsewhere,
		"flannelctl check --pod": elsewhere,
		"flannelctl check": func(m *machine, command string) {
			if err := l.PutNetwork(testContext(t), fmt.Appendf(nil, config, "")); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the former port", func() error {
				if out := m.run(command + " || true"); !strings.Contains(out, "UDP 8472)") || !strings.Contains(out, "(no answer)") {
					return errors.New(out)
				}
				return nil
			})
		},
		"flannelctl doctor --preflight": func(m *machine, command string) {
			fails(fresh, command)
			m.print(fresh.printed)
		},
		"flannelctl sysdump": fails,
		"systemctl disable":  func(m *machine, _ string) { expectStop(t, m.Daemon()) },
	})
	if left := m.run("ip -o link"); strings.Contains(left, "flannel") {
		t.Errorf("links after flannelctl cleanup: %s, want none of flannel's", left)
	}
}

// tryTwice starts a second daemon on the machine with the given flags. A third one with the same
// flags must end with an error, because both would have the same subnet file. Then tryTwice stops
// the second daemon and runs flannelctl cleanup.
func tryTwice(t *testing.T, m *machine, args []string) {
	t.Helper()
	options := lab.FlanneldOptions{Args: append(args, "--healthz-port=0")} // turns off the health port that the page sets
	second := start(t, m.Host, options)
	eventually(t, "the second daemon has a subnet", func() error {
		_, err := os.Stat(m.Path("/run/flannel/blue.env"))
		return err
	})
	third := start(t, m.Host, options)
	if code, err := third.Wait(testContext(t)); err != nil || code == 0 || !strings.Contains(third.Log(), "another flanneld runs with subnet file /run/flannel/blue.env") {
		t.Errorf("the third daemon ended with %d, %v, want an error that names the subnet file:\n%s", code, err, third.Log())
	}
	expectStop(t, second)
	m.run("bin/flannelctl cleanup --yes")
}

// TestPageDocker runs the commands of docker.md on a host. Its dockerd runs no containers, but
// records the arguments that it gets.
//
//stages:rest TestPageGettingStarted runs the commands of another page; dist has tests of the drop-in
func TestPageDocker(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	startOne(t, l.Host(1), lab.FlanneldOptions{})
	m := newMachine(t, l.Host(1))
	const units = "/etc/systemd/system/"
	m.write("/usr/sbin/dockerd", "#!/bin/sh\necho \"$@\" >/run/dockerd\n")
	m.write("/usr/bin/dockerd", "#!/bin/sh\necho \"$@\" >/run/dockerd\n")
	m.write("/usr/local/bin/flanneld", "#!/bin/sh\n")
	m.write(units+"docker.service", "[Service]\nType=notify\nExecStart=/usr/sbin/dockerd -H fd:// $DOCKER_OPTS\n")
	m.run("cp dist/systemd/flanneld.service " + units)
	m.run("cp /run/flannel/subnet.env .")
	bip := "--bip=" + strings.Replace(statusOf(t, l.Host(1)).Lease.Subnets[0].String(), ".0/", ".1/", 1)
	restart := func() {
		t.Helper()
		m.run("systemd-analyze verify --man=no docker.service")
		expectDocker(t, m, bip)
	}
	added := []string{}
	followPage(t, "docker.md", []*machine{m}, map[string]func(*machine, string){
		"systemctl daemon-reload":  func(*machine, string) { m.run("test -x /usr/local/bin/mk-docker-opts.sh") },
		"systemctl restart docker": func(*machine, string) { restart() },
		"dist/mk-docker-opts.sh": func(_ *machine, command string) {
			if out := m.run(command); out != "DOCKER_OPTS=\" "+bip+" --ip-masq=true --mtu=1450\"\n" {
				t.Errorf("%s: %s", command, out)
			}
		},
		"ExecStart=":    func(_ *machine, line string) { added = append(added, line) },
		"ExecStartPre=": func(*machine, string) {}, // TestDocker runs this line with a Docker that uses nftables
		"10.5.49.0/24":  func(*machine, string) {}, // output of the script
		"flannelctl doctor": func(m *machine, command string) { // must not mention Docker, because this one has no rules
			if out, _ := m.Exec(testContext(t), "chroot", machineRoot, machineTree+"/bin/"+command); strings.Contains(string(out), "Docker") {
				t.Errorf("%s: %s", command, out)
			}
		},
	})
	if len(added) != 2 || added[0] != "ExecStart=" {
		t.Fatalf("lines for the drop-in: %q, want two", added)
	}
	// The unit of Docker's own packages does not use DOCKER_OPTS, so it needs the added lines.
	m.write(units+"docker.service", "[Service]\nType=notify\nExecStart=/usr/bin/dockerd -H fd://\n")
	m.run(fmt.Sprintf("printf '%%s\\n' '%s' >>%s", strings.Join(added, "\n"), dockerDropIn))
	restart()
}

// expectDocker runs dockerd as systemd would, with the last settings of the unit and the drop-in,
// and checks its arguments. bip is the expected flag --bip.
func expectDocker(t *testing.T, m *machine, bip string) {
	t.Helper()
	text := m.run("cat /etc/systemd/system/docker.service " + dockerDropIn)
	last := func(key string) string {
		all := regexp.MustCompile(`(?m)^`+key+`=-?(.+)$`).FindAllStringSubmatch(text, -1)
		if all == nil {
			t.Fatalf("no %s in\n%s", key, text)
		}
		return all[len(all)-1][1]
	}
	m.run(last("ExecStartPre"))
	m.run(". " + last("EnvironmentFile") + "; " + last("ExecStart"))
	got := strings.Fields(m.run("cat /run/dockerd"))
	for _, want := range []string{bip, "--ip-masq=true", "--mtu=1450"} {
		if !slices.Contains(got, want) {
			t.Errorf("dockerd gets %q, want %s among them", got, want)
		}
	}
}

// TestPagesOnTheLab runs all commands that begin with bin/flannel-lab and contain --once, from
// all pages. It runs a command only once if several pages contain it.
//
//stages:rest it runs many commands of the documentation
func TestPagesOnTheLab(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob("../../Documentation/*.md")
	more, _ := filepath.Glob("../../Documentation/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	fails := map[string]bool{ // commands that must fail, as their pages say
		"bin/flannel-lab --hosts 2 --once --backend alloc":          true,
		"bin/flannel-lab --hosts 3 --l2 2 --backend host-gw --once": true,
	}
	seen := map[string]string{} // output by command
	for _, path := range append(paths, more...) {
		for _, e := range pageExamples(t, strings.TrimPrefix(path, "../../Documentation/")) {
			if !strings.HasPrefix(e.command, "bin/flannel-lab ") || !strings.Contains(e.command, "--once") {
				continue
			}
			if _, ran := seen[e.command]; !ran {
				cmd := exec.CommandContext(testContext(t), "sh", "-c", e.command)
				cmd.Dir = "../.."
				out, err := cmd.CombinedOutput()
				if (err != nil) != fails[e.command] {
					t.Errorf("%s: %s: %v\n%s", path, e.command, err, out)
				}
				seen[e.command] = string(out)
			}
			e.expect(t, seen[e.command])
		}
	}
	if len(seen) < 8 {
		t.Errorf("commands found: %v, want at least 8", seen)
	}
}

// TestPageHomeLab runs the commands of tutorial-home-lab.md on a host that runs the page's etcd, and on one
// behind a NAT, of which the other host sees only the router.
//
//stages:rest TestPageGettingStarted runs the commands of another page
func TestPageHomeLab(t *testing.T) {
	t.Parallel()
	const page, settings = "tutorial-home-lab.md", "/etc/flannel/flanneld.env"
	l := newLab(t, lab.Config{Hosts: 3}, "")
	hide(t, l.Host(2), l.Host(3), 0).set(t, portRestricted, 40002)
	cloud, home := newMachine(t, l.Host(1)), newMachine(t, l.Host(2))
	address := cloud.Addr(v4[0]).String()

	var etcd []string
	onCloud := func(m *machine, command string) {
		if m == cloud {
			m.runInShell(strings.ReplaceAll(command, "203.0.113.10", address))
		}
	}
	setting := func(m *machine, line string) {
		m.run(fmt.Sprintf("mkdir -p /etc/flannel; echo '%s' >>%s", strings.ReplaceAll(line, "203.0.113.10", address), settings))
	}
	followPage(t, page, []*machine{cloud, home}, map[string]func(*machine, string){
		"mkdir": onCloud, "openssl": onCloud, "printf": onCloud, "chmod": func(*machine, string) {}, // etcd runs as root here
		"ETCD_": func(m *machine, line string) {
			if m == cloud {
				etcd = append(etcd, strings.ReplaceAll(line, "203.0.113.10", address))
			}
		},
		"systemctl restart etcd": func(m *machine, _ string) {
			if m != cloud {
				return
			}
			cmd := exec.Command("chroot", machineRoot, "/usr/bin/etcd")
			etcd = append(etcd, "ETCD_DATA_DIR=/run/etcd")
			cmd.Env = etcd
			if err := m.Start(cmd); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
		},
		"etcdctl": func(m *machine, command string) {
			if m == cloud {
				eventually(t, "etcd answers a client with a certificate", func() error {
					out, err := m.Exec(testContext(t), "chroot", machineRoot, "sh", "-ec", strings.ReplaceAll("export ETCDCTL_API=3; "+command, "203.0.113.10", address))
					if err != nil {
						return fmt.Errorf("%w: %s", err, out)
					}
					return nil
				})
			}
		},
		"scp": func(m *machine, _ string) {
			if m != cloud {
				return
			}
			for _, name := range []string{"etcd-ca.pem", "etcd.pem", "etcd-key.pem"} {
				text, err := os.ReadFile(cloud.file("/etc/flannel/" + name))
				if err != nil {
					t.Fatal(err)
				}
				home.write("/etc/flannel/"+name, string(text))
			}
		},
		"FLANNELD_": setting,
		"systemctl enable --now flanneld": func(m *machine, _ string) {
			m.run("install -m 0755 bin/flanneld /usr/local/bin/")
			m.enable("/usr/local/bin/flanneld", settings)
			eventually(t, "flanneld is ready", func() error {
				_, err := m.Exec(testContext(t), "curl", "-sSf", "http://127.0.0.1:8471/readyz")
				return err
			})
		},
		"ip netns exec pod ping -c 3 10.5.201.2": func(m *machine, command string) {
			if m != home { // runs after the pod of home exists, and before that of wg show
				return
			}
			pod := strings.TrimSpace(home.run(`echo "${FLANNEL_SUBNET%.*}.2"`))
			eventually(t, "the pod behind NAT answers", func() error {
				out, err := cloud.Exec(testContext(t), "chroot", machineRoot, "sh", "-c", strings.Replace(command, "10.5.201.2", pod, 1))
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			})
		},
		"wg show flannel-wg endpoints": func(m *machine, command string) {
			if out := m.run(command); m == cloud && !strings.Contains(out, l.Host(3).Addr(v4[0]).String()+":40002") {
				t.Errorf("endpoints of cloud: %s, want the address of the NAT", out)
			}
		},
	})
}
