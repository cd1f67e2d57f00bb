package backend

// Listener is implemented by backends that carry packets in UDP.
type Listener interface {
	// Ports returns those of this host that peers send to. It is pure.
	Ports() []int
}

// Ports returns the UDP ports that peers send to: none for backends that take
// no UDP.
func Ports(b Backend) []int {
	if l, ok := b.(Listener); ok {
		return l.Ports()
	}
	return nil
}
