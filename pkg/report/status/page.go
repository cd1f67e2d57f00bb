// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	_ "embed"
	"fmt"
	"html"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/paths"
)

var (
	//go:embed page.css
	style markup
	//go:embed page.js
	script markup
)

// markup is HTML, which is not escaped again.
type markup string

// tag returns format with values in place of each %s. It escapes all values that are not markup.
//
// html/template would do that too, but calls methods by name. So the linker could not drop a method of
// any type, and flanneld would be larger by 6 MB.
func tag(format string, values ...any) markup {
	escaped := make([]any, len(values))
	for i, v := range values {
		text, ok := v.(markup)
		if !ok {
			text = markup(html.EscapeString(fmt.Sprint(v)))
		}
		escaped[i] = text
	}
	return markup(fmt.Sprintf(format, escaped...))
}

// some is like tag with one value, but returns nothing for an empty text.
func some(format, text string) markup {
	return when(text != "", format, text)
}

// when is like tag if the condition holds, and otherwise returns nothing.
func when(condition bool, format string, values ...any) markup {
	if !condition {
		return ""
	}
	return tag(format, values...)
}

// each joins what write returns for each value.
func each[T any](values []T, separator markup, write func(T) markup) markup {
	var all strings.Builder
	for i, v := range values {
		if i > 0 {
			all.WriteString(string(separator))
		}
		all.WriteString(string(write(v)))
	}
	return markup(all.String())
}

// bad returns the class of what is shown as bad.
func bad(condition bool) markup {
	return when(condition, ` class="bad"`)
}

// page returns the report as a page that contains all that it needs.
func page(r Report) markup {
	content := tag(`<div id="facts">%s</div>`, networks(r.Networks))
	if len(r.Networks) == 0 {
		content = tag(`<div id="facts">%s%s%s</div>%s`, cards(r), pathsOf(r), sharedAddresses(r.SharedPublicIPs), peers(r))
	}

	return tag(`<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%s: flanneld%s</title>
<style>
%s</style>
</head>
<body>
<h1>%s <span class="soft">flanneld%s%s %s</span></h1>
<div id="headline">%s</div>%s<div id="events">%s</div><script>
%s</script>
</body>
</html>
`,
		r.Host, some(" %s", join(r.Lease.Subnets)), style,
		r.Host, some(", network %s", r.Network.Name), some(" on %s", r.Interface.Name),
		each(r.Interface.Addresses, ", ", func(a Address) markup { return tag("%s", a.Public) }),
		headline(r), content, events(r), script)
}

// The levels of what is shown, and the class of each.
const (
	good = iota
	warn
	worse
)

func class(level int) string { return []string{"good", "warn", "bad"}[level] }

// levelOf returns the level of a peer's state or of a path's result.
func levelOf(text string) int {
	switch text {
	case string(InPlace), string(Reserved), "ok", "waiting", "unknown":
		return good
	case string(Held):
		return warn
	default:
		return worse
	}
}

// worstFirst returns the states or results that some peers or paths have.
func worstFirst[T ~string](count map[T]int) []T {
	all := slices.DeleteFunc(slices.Sorted(maps.Keys(count)), func(text T) bool { return count[text] == 0 })
	slices.SortStableFunc(all, func(a, b T) int { return levelOf(string(b)) - levelOf(string(a)) })
	return all
}

// headline returns the counts of peers and paths, in the color of what is worst, and the reasons.
func headline(r Report) markup {
	worst := good
	var parts []string
	add := func(level int, format string, values ...any) {
		worst = max(worst, level)
		parts = append(parts, fmt.Sprintf(format, values...))
	}

	if r.Ready {
		add(good, "ready")
	} else {
		add(worse, "not ready")
	}
	if !r.Datastore.Connected && !r.Datastore.Since.IsZero() {
		add(warn, "%s away", r.Datastore.Kind)
	}
	if r.RestartNeeded != "" || r.ConfigRejected != "" {
		worst = max(worst, warn)
	}

	count := r.PeerStates()
	for _, s := range worstFirst(count) {
		add(levelOf(string(s)), "%s %s", counted(count[s], "peer"), s)
	}
	if r.Paths != nil {
		for _, result := range worstFirst(r.Paths.Results) {
			add(levelOf(result), "%s %s", counted(r.Paths.Results[result], "path"), result)
		}
	}

	return tag("<p class=\"state %s\">%s</p>\n%s%s%s", class(worst), strings.Join(parts, ", "),
		when(len(r.Reasons) > 0, `<ul class="bad">%s</ul>`, each(r.Reasons, "", func(reason string) markup { return tag("<li>%s</li>", reason) })),
		some(`<p class="state warn">restart needed: %s</p>`, r.RestartNeeded),
		some(`<p class="state warn">configuration rejected: %s</p>`, r.ConfigRejected))
}

func counted(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}

func networks(all []NetworkSummary) markup {
	return tag(`<h2>Networks <span class="soft">%s</span></h2>
<div class="scroll"><table>
<thead><tr><th>Network</th><th>Phase</th><th>Backend</th><th>Range</th><th>Subnet</th><th>Reason</th></tr></thead>
<tbody>%s</tbody></table></div>
`, len(all), each(all, "", func(n NetworkSummary) markup {
		return tag(`<tr><td data-name="Network"><a href="?network=%s">%s</a></td><td data-name="Phase"%s>%s</td><td data-name="Backend">%s</td>`+
			`<td data-name="Range">%s</td><td data-name="Subnet">%s</td><td data-name="Reason">%s</td></tr>`+"\n",
			url.QueryEscape(n.Name), n.Name, bad(!n.Ready), n.Phase, n.BackendType, join(n.Prefixes), join(n.Subnets), strings.Join(n.Reasons, "; "))
	}))
}

// cards returns what is known about this host, the network and the kernel.
func cards(r Report) markup {
	return tag("<div class=\"grid\">\n%s%s%s</div>\n", card("This host", hostFacts(r)), card("Network", networkFacts(r)), card("Kernel", kernelFacts(r)))
}

func card(title string, facts markup) markup {
	return tag("<section class=\"card\"><h2>%s</h2><dl>\n%s</dl></section>\n", title, facts)
}

// fact returns a fact of a card, whose value has several parts.
func fact(name string, parts ...any) markup {
	return tag("<dt>%s</dt><dd>%s</dd>\n", name, each(parts, "", func(part any) markup { return tag("%s", part) }))
}

func hostFacts(r Report) markup {
	i := r.Interface
	return fact("Subnet", cmp.Or(join(r.Lease.Subnets), "none yet")) +
		fact("Lease", r.Lease.Key, validity(r)) +
		fact("Interface", i.Name, ", MTU ", i.MTU, some(` <span class="soft">(%s)</span>`, i.Reason)) +
		fact("Addresses", each(i.Addresses, ", ", func(a Address) markup {
			return tag("%s", a.Local) + when(a.Local != a.Public, " (public %s)", a.Public)
		})) +
		fact("Version", r.Version) +
		fact("Running", "since ", utc(r.Started), ", pid ", r.PID)
}

func kernelFacts(r Report) markup {
	return fact("Last in sync", ago(r.Now, r.Kernel.LastSync), some(`: <span class="bad">%s</span>`, r.Kernel.Error)) +
		each([]string{"link", "address", "neighbour", "fdb", "route"}, "", func(kind string) markup {
			n := r.Kernel.Objects[kind]
			return fact(kind, tag("<span%s>%s of %s</span>", bad(n.Present < n.Wanted), n.Present, n.Wanted))
		})
}

func validity(r Report) markup {
	if r.Lease.Permanent {
		return " (permanent)"
	}
	return when(!r.Lease.Expires.IsZero(), ", expires %s unless renewed", ago(r.Now, r.Lease.Expires))
}

func networkFacts(r Report) markup {
	n := r.Network
	facts := fact("Phase", n.Phase) + fact("Backend", n.BackendType, some(", %s", n.Mode)) + fact("Network", join(n.Prefixes)) + fact("MTU", n.MTU)
	if p := n.Pool; p != nil {
		facts += fact("Subnets", tag("<span%s>%s free, %s leased, %s reserved</span>", bad(p.Free == 0), p.Free, p.Leased, p.Reserved))
	}
	if l := n.Location; l != nil {
		facts += fact("Location", cmp.Or(l.Name, "none"), markup("<br>"), counted(l.ByInside, "peer"), " by ", l.Inside, ", ", l.ByBetween, " by ", l.Between)
	}
	if c := n.Cloud; c != nil {
		facts += cloud(r.Now, *c)
	}

	store := markup(`<span class="bad">away</span>`)
	if r.Datastore.Connected {
		store = `<span class="good">connected</span>`
	}
	rules := fact("Firewall", "no rules configured")
	if f := r.Firewall; f.Kind != "" || f.Error != "" {
		rules = fact("Firewall", f.Kind, when(f.Kind != "" && f.Error != "", ": "), some(`<span class="bad">%s</span>`, f.Error))
	}
	return facts + fact("Subnet file", n.SubnetFile) +
		fact("Datastore", r.Datastore.Kind, ", ", store, when(!r.Datastore.Since.IsZero(), " for %s", coarse(r.Now.Sub(r.Datastore.Since))), some(": %s", r.Datastore.Error)) +
		rules
}

func cloud(now time.Time, c Cloud) markup {
	routes := each(c.Routes, "", func(route CloudRoute) markup {
		return tag("<br><span%s>%s%s</span>", bad(!route.Present), route, when(!route.Present, ": missing"))
	})
	var overflow markup
	if o := c.Overflow; o != nil {
		overflow = tag("<br>%s by the cloud, %s by %s%s",
			counted(o.ByCloud, "peer"), o.ByTunnel, o.Tunnel, some(`<br><span class="bad">%s</span>`, o.Problem))
	}
	return fact("Cloud", "last in order ", ago(now, c.LastGood), routes, overflow)
}

func pathsOf(r Report) markup {
	if r.Paths == nil {
		return ""
	}

	var bar markup
	for _, result := range worstFirst(r.Paths.Results) {
		n := r.Paths.Results[result]
		bar += tag(`<span class="%s" style="flex-grow: %s">%s %s</span>`, result, n, n, result)
	}

	rows := each(r.Paths.Worst, "", func(p paths.Result) markup {
		return tag(`<tr><td data-name="Path to">%s</td><td data-name="Public IP">%s</td><td data-name="Result" class="%s">%s</td>`+
			`<td data-name="Round trip">%s</td><td data-name="Since">%s</td><td data-name="Advice">%s</td></tr>`+"\n",
			p.Subnet, p.PublicIP, class(levelOf(p.Result())), p.Result(), p.RoundTrip(), ago(r.Now, p.Since), p.Text())
	})

	return tag(`<h2>Paths to peers</h2>
<div class="bar" role="img" aria-label="Paths by result">%s</div>
<div class="scroll"><table>
<thead><tr><th>Worst paths</th><th>Public IP</th><th>Result</th><th>Round trip</th><th>Since</th><th>Advice</th></tr></thead>
<tbody>%s</tbody></table></div>
`, bar, rows)
}

func sharedAddresses(all []SharedPublicIP) markup {
	return when(len(all) > 0, "<h2>Shared public addresses</h2>\n"+`<ul class="warn">%s</ul>`+"\n", each(all, "", func(s SharedPublicIP) markup {
		return tag("<li>%s: %s</li>", s.PublicIP, strings.Join(s.Leases, ", "))
	}))
}

func peers(r Report) markup {
	columns := each([]string{"Subnet", "Public IP", "Type", "State", "Kernel", "Changed", "Error"}, "", func(name string) markup {
		return tag(`<th><button type="button">%s</button></th>`, name)
	})

	carriers := r.Network.Cloud != nil || r.Network.Location != nil
	sorted := slices.Clone(r.Peers)
	slices.SortStableFunc(sorted, func(a, b Peer) int { return levelOf(string(b.State)) - levelOf(string(a.State)) })
	rows := each(sorted, "", func(p Peer) markup {
		objects := each(p.Objects, "", func(o Object) markup {
			return tag("<code%s>%s</code><br>", when(!o.Present, ` class="bad" title="missing"`), o.Text)
		})
		return tag(`<tr data-state="%s"><td data-name="Subnet">%s</td><td data-name="Public IP">%s</td><td data-name="Type">%s</td>`+
			`<td data-name="State" class="%s">%s</td><td data-name="Kernel">%s</td><td data-name="Changed" data-sort="%s">%s</td><td data-name="Error">%s%s</td></tr>`+"\n",
			p.State, join(p.Subnets), join(p.PublicIPs), p.Type,
			class(levelOf(string(p.State))), p.State, when(len(p.Objects) > 0, "<details><summary>%s</summary>%s</details>", len(p.Objects), objects),
			p.Changed.Unix(), ago(r.Now, p.Changed),
			p.Error, when(carriers && p.Waiting != "", " by %s: %s", p.Backend, p.Waiting))
	})

	return tag(`<h2>Peers <span class="soft" id="shown">%s</span></h2>
<div class="tools"><input id="filter" type="search" placeholder="filter: subnet, address, type, error" aria-label="Filter peers" size="34">
<select id="state" aria-label="State"><option value="">all states</option><option>in place</option><option>missing</option><option>held</option><option>refused</option><option>reserved</option></select></div>
<div class="scroll"><table id="peers">
<thead><tr>%s</tr></thead>
<tbody>
%s</tbody></table></div>
`, len(r.Peers), columns, rows)
}

func events(r Report) markup {
	newest := slices.Clone(r.Events)
	slices.Reverse(newest)

	return tag(`<h2>Recent events</h2>
<ol>%s</ol>
<p class="soft">As of %s. For JSON, request /statusz.json.</p>
`, each(newest, "", func(e Event) markup {
		return tag(`<li%s><time datetime="%s">%s</time> %s</li>`, bad(e.Error), e.Time.UTC().Format(time.RFC3339), e.Time.UTC().Format(time.DateTime), e.Text)
	}), utc(r.Now))
}

func utc(t time.Time) string { return t.UTC().Format(time.DateTime + " UTC") }

// join returns the elements of a list of prefixes or addresses as one text, separated by commas.
func join(values any) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(values), "[]"), " ", ", ")
}

// ago describes how long before now t was, in rough units. It says "in" for a time in the future,
// and "never" for the zero time.
func ago(now, t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	d := now.Sub(t)
	if d < 0 {
		return "in " + coarse(-d)
	}
	return coarse(d) + " ago"
}

func coarse(d time.Duration) string {
	switch {
	case d < time.Second:
		return "a moment"
	case d < 2*time.Minute:
		return d.Truncate(time.Second).String()
	case d < 2*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Hour).String(), "0m0s")
	default:
		return strings.TrimSuffix((d/24).Truncate(time.Hour).String(), "h0m0s") + "d"
	}
}
