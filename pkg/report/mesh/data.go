// SPDX-License-Identifier: Apache-2.0

package mesh

import "net/netip"

// MaxCells is the number of hosts up to which Data contains every cell. A picture shows at most that many
// hosts.
const MaxCells = 200

// MaxBroken is the greatest number of broken paths that Data contains.
const MaxBroken = 10_000

// Data is a Matrix for programs. Its JSON is a stable interface.
type Data struct {
	Paths Counts     `json:"paths"`
	Hosts []HostData `json:"hosts"`
	// Broken are the paths that do not work, at most MaxBroken of them.
	Broken []CellData `json:"broken"`
	// BrokenOmitted is the number of broken paths that Broken does not contain.
	BrokenOmitted int `json:"brokenOmitted,omitempty"`
	// Cells are all paths of which it is known whether they work. They are absent with more than MaxCells
	// hosts.
	Cells []CellData `json:"cells,omitempty"`
}

// HostData is a host, with the numbers of its paths.
type HostData struct {
	Host
	Problem string `json:"problem,omitempty"` // why no paths are known from this host; empty if they are known
	CutOff  string `json:"cutOff,omitempty"`  // see Matrix.CutOff
	From    Counts `json:"from"`              // paths from this host, as it sees them
	To      Counts `json:"to"`                // paths to this host, as the others see them
}

// CellData is the path from one host to another, as the first one sees it.
type CellData struct {
	From string `json:"from"` // name
	To   string `json:"to"`
	Cell
}

// Data returns the matrix for programs.
func (m *Matrix) Data() Data {
	s := m.Summary()
	d := Data{Paths: s.Counts, Hosts: []HostData{}, Broken: m.Broken(MaxBroken)}
	for i, h := range m.Hosts {
		if h.PublicIPs == nil {
			h.PublicIPs = []netip.Addr{}
		}
		d.Hosts = append(d.Hosts, HostData{h, m.Problem(i), m.CutOff(i), s.From[i], s.To[i]})
	}

	d.BrokenOmitted = s.Broken - len(d.Broken)
	if len(m.Hosts) > MaxCells {
		return d
	}

	for from := range m.Hosts {
		for to := range m.Hosts {
			if m.result(from, to) != Unknown {
				d.Cells = append(d.Cells, m.data(from, to))
			}
		}
	}
	return d
}

func (m *Matrix) data(from, to int) CellData {
	return CellData{m.Hosts[from].Name, m.Hosts[to].Name, m.Cell(from, to)}
}
