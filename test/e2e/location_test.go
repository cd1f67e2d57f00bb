// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// way contains the numbers of frames that one host has sent to another. A frame that carries a marker by
// vxlan counts in both fields, clear and vxlan.
type way struct {
	clear     int // frames with a marker in clear text, with or without vxlan
	vxlan     int // frames of vxlan
	encrypted int // frames of WireGuard that carry a packet
}

// locationBed is a lab whose hosts have locations. It counts the frames that its hosts send to each other.
type locationBed struct {
	*lab.Lab
	t      *testing.T
	inside string // type of the backend inside of a location

	drained []func() error // results of captureFrames, in the order of the hosts

	markers map[[2]string]func() // functions that stop the markers, by the names of the sending and the receiving pod

	mu   sync.Mutex
	ways map[[2]int]way // by the numbers of the sending and the receiving host, from 1
}

// newLocationBed builds a lab of hosts without daemons and without pods. inside is the type of the backend
// inside of a location. The captures of all frames begin before the first daemon starts.
func newLocationBed(t *testing.T, inside string, hosts int) *locationBed {
	t.Helper()
	b := &locationBed{t: t, inside: inside, ways: map[[2]int]way{}, markers: map[[2]string]func(){}}
	b.Lab = newLab(t, lab.Config{Hosts: hosts, Families: dual}, fmt.Sprintf(`{"Type":"wireguard","Implementation":"userspace","SameLocation":%q}`, inside))
	numbers := map[[6]byte]int{} // of hosts, by the MAC of eth0
	for i, h := range b.Hosts() {
		err := h.Do(testContext(t), func() error {
			eth0, err := net.InterfaceByName("eth0")
			if err == nil {
				numbers[[6]byte(eth0.HardwareAddr)] = i + 1
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, h := range b.Hosts() {
		b.drained = append(b.drained, captureFrames(t, h, func(frame []byte) {
			if len(frame) < 14 {
				return
			}
			to, ok := numbers[[6]byte(frame)]
			if !ok { // the frame goes to all hosts, or to the router
				return
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			w := b.ways[[2]int{i + 1, to}]
			w.add(frame)
			b.ways[[2]int{i + 1, to}] = w
		}))
	}
	return b
}

// add counts an Ethernet frame.
func (w *way) add(frame []byte) {
	if bytes.Contains(frame, []byte(marker)) {
		w.clear++
	}
	var udp []byte
	switch packet := frame[14:]; {
	case binary.BigEndian.Uint16(frame[12:]) == 0x0800 && len(packet) >= 28 && packet[9] == 17:
		udp = packet[4*int(packet[0]&15):]
	case binary.BigEndian.Uint16(frame[12:]) == 0x86dd && len(packet) >= 48 && packet[6] == 17:
		udp = packet[40:]
	}
	if len(udp) < 9 {
		return
	}
	switch binary.BigEndian.Uint16(udp[2:]) {
	case 8472:
		w.vxlan++
	case 51820, 51821:
		const empty = 32 // bytes of a keepalive, which carries no packet
		if payload := udp[8:]; payload[0] == 4 && len(payload) > empty {
			w.encrypted++
		}
	}
}

// sent returns a copy of the counts so far, by the numbers of the sending and the receiving host.
func (b *locationBed) sent() map[[2]int]way {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.ways)
}

// start starts the daemon of host n and waits until it is ready. If location is empty, the daemon gets no
// location.
func (b *locationBed) start(n int, location string) *lab.Daemon {
	b.t.Helper()
	var o lab.FlanneldOptions
	if location != "" {
		o.Args = []string{"--location=" + location}
	}
	return startOne(b.t, b.Host(n), o)
}

// sendMarkers makes every pod send markers to every other one.
func (b *locationBed) sendMarkers() {
	b.t.Helper()
	for _, from := range b.Pods() {
		for _, to := range b.Pods() {
			if from != to {
				b.markers[[2]string{from.Name(), to.Name()}] = sendMarkers(b.t, b.Lab, from, to)
			}
		}
	}
}

// stopMarkers stops the markers between the pods of hosts n and m, in both directions. sendMarkers must
// have been called.
func (b *locationBed) stopMarkers(n, m int) {
	p, q := b.Pods()[n-1].Name(), b.Pods()[m-1].Name()
	b.markers[[2]string{p, q}]()
	b.markers[[2]string{q, p}]()
}

// expectLocations waits until all hosts report their locations, which are given in the order of the hosts.
// An empty location means that the host has none. Then it waits until frames have passed between all hosts.
// Between hosts with the same location they must be in clear text and go by the backend b.inside, and
// between other hosts they must be encrypted. The test fails if hosts with the same location send each
// other an encrypted packet, or other hosts one in clear text or by vxlan.
func (b *locationBed) expectLocations(locations ...string) {
	t := b.t
	t.Helper()
	same := func(i, j int) bool { return locations[i] != "" && locations[i] == locations[j] }
	for i, h := range b.Hosts() {
		want := status.Location{Name: locations[i], Inside: b.inside, Between: "wireguard"}
		for j := range b.Hosts() {
			switch {
			case i == j:
			case same(i, j):
				want.ByInside++
			default:
				want.ByBetween++
			}
		}
		eventually(t, fmt.Sprintf("%s reports %+v", h.Name(), want), func() error {
			r := statusOf(t, h)
			if r.Network.Location == nil || *r.Network.Location != want {
				return fmt.Errorf("it reports %+v", r.Network.Location)
			}
			for _, p := range r.Peers {
				if p.State != status.InPlace || p.Waiting != "" {
					return fmt.Errorf("%v is %s: %s", p.Subnets, p.State, p.Waiting)
				}
			}
			return nil
		})
	}
	expectMatrix(t, b.Lab)
	for i, drained := range b.drained {
		eventually(t, fmt.Sprintf("the capture at host%d is up to date", i+1), drained)
	}
	before := b.sent()
	eventually(t, "all hosts send by the expected way", func() error {
		after := b.sent()
		for i := range b.Hosts() {
			for j := range b.Hosts() {
				if i == j {
					continue
				}
				pair := [2]int{i + 1, j + 1}
				was, is := before[pair], after[pair]
				n := way{is.clear - was.clear, is.vxlan - was.vxlan, is.encrypted - was.encrypted}
				if same(i, j) && n.encrypted > 0 || !same(i, j) && (n.clear > 0 || n.vxlan > 0) || n.vxlan > 0 && b.inside != "vxlan" {
					t.Fatalf("from host%d to host%d, at the same location %v: %+v", i+1, j+1, same(i, j), n)
				}
				if same(i, j) && (n.clear == 0 || (n.vxlan > 0) != (b.inside == "vxlan")) || !same(i, j) && n.encrypted == 0 {
					return fmt.Errorf("from host%d to host%d, at the same location %v: %+v", i+1, j+1, same(i, j), n)
				}
			}
		}
		return nil
	})
}

// testLocations checks a lab with two hosts at each of two locations. While packets flow between hosts 1
// and 2, host 2 restarts at the other location. No packet may be lost. Then host 4 restarts without a
// location.
func testLocations(t *testing.T, inside string) {
	t.Helper()
	b := newLocationBed(t, inside, 4)
	for i, location := range []string{"east", "east", "west", "west"} {
		b.start(i+1, location)
	}
	if err := b.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	b.sendMarkers()
	b.expectLocations("east", "east", "west", "west")
	for pair, w := range b.sent() {
		if (pair[0] <= 2) != (pair[1] <= 2) && (w.clear > 0 || w.vxlan > 0) {
			t.Errorf("from host%d to host%d since the start: %+v", pair[0], pair[1], w)
		}
	}
	expectMTU(t, b.Lab, 1420)
	for series, want := range map[string]float64{inside: 1, "wireguard": 2} {
		if n := metric(t, b.Host(1), fmt.Sprintf(`flannel_location_peers{backend=%q}`, series)); n != want {
			t.Errorf("%v peers by %s in the metrics, want %v", n, series, want)
		}
	}
	out := expectFlannelctl(t, b.Host(1), []string{"status"}, "location", "east: sends to 1 peer by "+inside+", to 2 by wireguard")
	if inside == "vxlan" {
		expectOnPage(t, "locations.md", "flannelctl status", out)
	}

	// WireGuard in user space carries nothing while its daemon restarts, so only hosts 1 and 2 have flows:
	// they send without WireGuard until host 2 has restarted. After that, up to 128 packets wait for the
	// first handshake. So that no more have to wait, the flows are slow and the markers between the two
	// stop.
	b.stopMarkers(1, 2)
	var flows []flow
	for _, pair := range [][2]int{{0, 1}, {1, 0}} {
		from, to := b.Pods()[pair[0]], b.Pods()[pair[1]]
		for _, f := range b.Families() {
			one, err := from.StartFlow(testContext(t), to, f, 20)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { one.Stop() })
			flows = append(flows, flow{one, fmt.Sprintf("%s to %s by %s", from.Name(), to.Name(), f)})
		}
	}
	expectStop(t, b.Host(2).Daemon())
	b.start(2, "west")
	b.expectLocations("east", "west", "west", "west")
	expectNothingLost(t, flows)
	for _, pair := range [][2]int{{0, 1}, {1, 0}} {
		sendMarkers(t, b.Lab, b.Pods()[pair[0]], b.Pods()[pair[1]])
	}

	expectStop(t, b.Host(4).Daemon())
	expectLog(t, b.start(4, ""), "this host has no location")
	b.expectLocations("east", "west", "west", "")
}

// TestLocationsVXLAN checks vxlan inside of locations, and WireGuard between them.
func TestLocationsVXLAN(t *testing.T) {
	t.Parallel()
	testLocations(t, "vxlan")
}

// TestLocationsHostGW checks host-gw inside of locations, and WireGuard between them.
//
//stages:rest TestLocationsVXLAN does the same with a tunnel
func TestLocationsHostGW(t *testing.T) {
	t.Parallel()
	testLocations(t, "host-gw")
}

// TestLocationRefused checks that a host with a location does not start if the configuration has no
// SameLocation. If SameLocation is removed while a host with a location runs, the host must reject the
// change and go on.
func TestLocationRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, backendConfig(userspace))
	o := lab.FlanneldOptions{Args: []string{"--location=east"}}
	expectFailure(t, start(t, l.Host(1), o), "--location east cannot be used: the backend wireguard has no locations: expected wireguard with SameLocation as Backend")
	putConfig(t, l, `{"Type":"wireguard","Implementation":"userspace","SameLocation":"vxlan"}`)
	d := startOne(t, l.Host(1), o)
	putConfig(t, l, backendConfig(userspace))
	expectLog(t, d, "--location east cannot be used")
	eventually(t, "the host goes on with its location", func() error {
		if r := statusOf(t, l.Host(1)); r.Network.Location == nil || r.ConfigRejected == "" {
			return fmt.Errorf("it reports %+v, and rejects %q", r.Network.Location, r.ConfigRejected)
		}
		return nil
	})
}

// TestLocationMigration migrates from vxlan to wireguard with locations, and back. No packet may be lost
// until all hosts send by wireguard; later the test does not count packets.
//
//stages:rest TestLocationsVXLAN changes the way of packets, and other tests migrate
func TestLocationMigration(t *testing.T) {
	t.Parallel()
	const plain, located = `{"Type":"vxlan"}`, `{"Type":"wireguard","Implementation":"userspace","SameLocation":{"Type":"vxlan","VNI":2}}`
	l := newLab(t, lab.Config{Hosts: 3, Families: dual}, plain)
	startAll(t, l, oneByOne())
	expectConverged(t, l)
	restart := func(locations ...string) {
		t.Helper()
		for i, h := range l.Hosts() {
			expectStop(t, h.Daemon())
			o := oneByOne()
			if locations != nil {
				o.Args = append(o.Args, "--location="+locations[i])
			}
			startOne(t, h, o)
		}
	}
	flows := startFlows(t, l, 100)
	migrate(t, l, plain, located)
	restart("east", "east", "west")
	eventuallyCarriedBy(t, l.Host(1), "wireguard", l.Host(2), l.Host(3))
	eventuallyCarriedBy(t, l.Host(2), "wireguard", l.Host(1), l.Host(3))
	eventuallyCarriedBy(t, l.Host(3), "wireguard", l.Host(1), l.Host(2))
	if o := statusOf(t, l.Host(1)).Network.Location; o == nil || o.ByInside != 1 || o.ByBetween != 1 {
		t.Errorf("host1 reports %+v", o)
	}
	out, err := flannelctl(t, l.Host(1), "migrate", "status", "--socket="+l.Host(1).Path(socket))
	if err != nil || strings.Contains(out, "in clear text") {
		t.Errorf("packets to host2 leave host1 in clear text, but flannelctl prints %v\n%s", err, out)
	}
	expectNothingLost(t, flows) // later packets may be lost, because WireGuard in user space carries nothing while its daemon restarts
	migrate(t, l, located, "")
	restart("east", "east", "west")
	expectMatrix(t, l)
	migrate(t, l, located, plain)
	restart("east", "east", "west")
	eventuallyCarriedBy(t, l.Host(1), "vxlan", l.Host(2), l.Host(3))
	expectMatrix(t, l)
	migrate(t, l, plain, "")
	restart()
	eventually(t, "the devices of locations are gone", func() error {
		for _, h := range l.Hosts() {
			if out, err := h.Exec(testContext(t), "ip", "-br", "link"); err != nil || strings.Contains(string(out), "flannel.2") {
				return errors.Join(err, fmt.Errorf("%s", out))
			}
		}
		return nil
	})
	expectMatrix(t, l)
}

// TestKubeLocationLabel checks that hosts take their locations from a label of their Nodes. A host that
// restarts while the API server is down must keep its location.
//
//stages:rest TestLocation in subnet/kube reads the label, and TestLocationsVXLAN uses locations
func TestKubeLocationLabel(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 3}, `{"Type":"wireguard","Implementation":"userspace","SameLocation":"host-gw"}`)
	const flag = "--location-label=example.org/site"
	for n := 1; n <= 2; n++ {
		c.do(http.MethodPatch, nodesPath+"/"+nodeName(n), map[string]any{"metadata": map[string]any{"labels": map[string]any{"example.org/site": "east"}}}, "application/merge-patch+json")
	}
	c.startDaemons(flag)
	expectLocation := func(n int, name string, inside int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s is at %q", c.Host(n).Name(), name), func() error {
			l := statusOf(t, c.Host(n)).Network.Location
			if l == nil || l.Name != name || l.ByInside != inside {
				return fmt.Errorf("it reports %+v", l)
			}
			return nil
		})
	}
	expectLocation(1, "east", 1)
	expectLocation(2, "east", 1)
	expectLocation(3, "", 0)
	expectOnce(t, c.Host(3).Daemon(), "this node has no location")
	expectMatrix(t, c.Lab)
	expectStop(t, c.Host(1).Daemon())
	c.kill()
	expectLog(t, start(t, c.Host(1), c.options(1, flag)), "going on from the last known state")
	expectLocation(1, "east", 1)
	expectMatrix(t, c.Lab)
}
