// SPDX-License-Identifier: Apache-2.0

package ec2test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// failure is an error of EC2.
type failure struct {
	status        int
	code, message string
}

func invalid(code, format string, args ...any) *failure {
	return &failure{http.StatusBadRequest, code, fmt.Sprintf(format, args...)}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	form, err := url.ParseQuery(string(body))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	action, dry := form.Get("Action"), form.Get("DryRun") == "true"
	answer, failed := s.answer(r, body, action, form)
	if failed == nil && dry {
		failed = &failure{http.StatusPreconditionFailed, "DryRunOperation", "Request would have succeeded, but DryRun flag is set."}
	}
	code := ""
	if failed != nil {
		code = failed.code
	}
	s.calls = append(s.calls, Call{Action: action, DryRun: dry, Code: code})
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	if failed != nil {
		w.WriteHeader(failed.status)
		answer = errorAnswer{Errors: []errorItem{{failed.code, failed.message}}, RequestID: "test"}
	}
	_ = xml.NewEncoder(w).Encode(answer)
}

type errorAnswer struct {
	XMLName   xml.Name    `xml:"Response"`
	Errors    []errorItem `xml:"Errors>Error"`
	RequestID string      `xml:"RequestID"`
}

type errorItem struct {
	Code    string
	Message string
}

// answer returns the answer to a call. It changes nothing in a dry run.
func (s *Server) answer(r *http.Request, body []byte, action string, form url.Values) (any, *failure) {
	switch {
	case s.away:
		return nil, &failure{http.StatusServiceUnavailable, "Unavailable", "The service is unavailable."}
	case !signed(r, body):
		return nil, &failure{http.StatusUnauthorized, "AuthFailure", "AWS was not able to validate the provided access credentials"}
	case s.throttled > 0:
		s.throttled--
		return nil, &failure{http.StatusServiceUnavailable, "RequestLimitExceeded", "Request limit exceeded."}
	case s.denied[action]:
		return nil, &failure{http.StatusForbidden, "UnauthorizedOperation", "You are not authorized to perform this operation. Encoded authorization failure message: " + strings.Repeat("x", 500)}
	}
	dry := form.Get("DryRun") == "true"
	switch action {
	case "DescribeInstances":
		return s.describeInstances(form)
	case "DescribeRouteTables":
		return s.describeTables(form)
	case "CreateRoute", "ReplaceRoute", "DeleteRoute":
		if dry {
			return nil, nil
		}
		return s.changeRoute(action, form)
	case "ModifyNetworkInterfaceAttribute":
		i, ok := s.at(form.Get("NetworkInterfaceId"))
		switch {
		case !ok:
			return nil, invalid("InvalidNetworkInterfaceID.NotFound", "no interface %s", form.Get("NetworkInterfaceId"))
		case !dry:
			i.SourceDestCheck = form.Get("SourceDestCheck.Value") != "false"
			s.instances[i.ID] = i
		}
		return done{XMLName: xml.Name{Local: action + "Response"}, Return: true}, nil
	}
	return nil, invalid("InvalidAction", "The action %s is not valid for this web service.", action)
}

// done is the answer to a call that changes something.
type done struct {
	XMLName xml.Name
	Return  bool `xml:"return"`
}

// signed reports whether the request has the signature that its content and the credentials of
// the instances lead to.
func signed(r *http.Request, body []byte) bool {
	at, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	if err != nil {
		return false
	}
	again, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+r.Host+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return false
	}
	again.Header.Set("Content-Type", r.Header.Get("Content-Type"))
	sum := sha256.Sum256(body)
	credentials := aws.Credentials{AccessKeyID: AccessKey, SecretAccessKey: SecretKey, SessionToken: SessionToken}
	if err := v4.NewSigner().SignHTTP(r.Context(), credentials, again, hex.EncodeToString(sum[:]), "ec2", Region, at); err != nil {
		return false
	}
	return again.Header.Get("Authorization") == r.Header.Get("Authorization")
}

// list returns the values of the numbered parameters name.1, name.2 and so on.
func list(form url.Values, name string) (values []string) {
	for i := 1; form.Has(name + "." + strconv.Itoa(i)); i++ {
		values = append(values, form.Get(name+"."+strconv.Itoa(i)))
	}
	return values
}

// filters returns the filters of a call, with the values by name.
func filters(form url.Values) map[string][]string {
	all := map[string][]string{}
	for i := 1; form.Has(fmt.Sprintf("Filter.%d.Name", i)); i++ {
		all[form.Get(fmt.Sprintf("Filter.%d.Name", i))] = list(form, fmt.Sprintf("Filter.%d.Value", i))
	}
	return all
}

// cut returns a page of items, and the token of the next one.
func cut[T any](s *Server, form url.Values, items []T) (page []T, next string) {
	begin, _ := strconv.Atoi(form.Get("NextToken"))
	size, err := strconv.Atoi(form.Get("MaxResults"))
	if err != nil || size > s.pageSize {
		size = s.pageSize
	}
	end := min(begin+size, len(items))
	if end < len(items) {
		next = strconv.Itoa(end)
	}
	return items[min(begin, end):end], next
}

type instanceAnswer struct {
	XMLName   xml.Name       `xml:"DescribeInstancesResponse"`
	Instances []instanceItem `xml:"reservationSet>item>instancesSet>item"`
	NextToken string         `xml:"nextToken,omitempty"`
}

type instanceItem struct {
	ID         string          `xml:"instanceId"`
	State      string          `xml:"instanceState>name"`
	Interfaces []interfaceItem `xml:"networkInterfaceSet>item"`
}

type interfaceItem struct {
	ID              string   `xml:"networkInterfaceId"`
	Subnet          string   `xml:"subnetId"`
	VPC             string   `xml:"vpcId"`
	SourceDestCheck bool     `xml:"sourceDestCheck"`
	IPv4            []string `xml:"privateIpAddressesSet>item>privateIpAddress"`
	IPv6            []string `xml:"ipv6AddressesSet>item>ipv6Address"`
}

func (s *Server) describeInstances(form url.Values) (any, *failure) {
	ids, chosen := list(form, "InstanceId"), filters(form)
	for _, id := range ids {
		if _, ok := s.instances[id]; !ok {
			return nil, invalid("InvalidInstanceID.NotFound", "The instance ID '%s' does not exist", id)
		}
	}
	var all []instanceItem
	for _, id := range slices.Sorted(maps.Keys(s.instances)) {
		i := s.instances[id]
		wanted := len(ids) == 0 || slices.Contains(ids, id)
		for name, values := range chosen {
			if name != "network-interface.network-interface-id" {
				return nil, invalid("InvalidParameterValue", "The filter '%s' is invalid", name)
			}
			wanted = wanted && slices.Contains(values, i.Interface)
		}
		if wanted {
			all = append(all, i.item())
		}
	}
	var a instanceAnswer
	a.Instances, a.NextToken = cut(s, form, all)
	return a, nil
}

func (i Instance) item() instanceItem {
	n := interfaceItem{ID: i.Interface, Subnet: i.Subnet, VPC: VPC, SourceDestCheck: i.SourceDestCheck}
	for _, a := range i.Addresses {
		if a.Is4() {
			n.IPv4 = append(n.IPv4, a.String())
		} else {
			n.IPv6 = append(n.IPv6, a.String())
		}
	}
	state := "running"
	if i.Stopped {
		state = "stopped"
	}
	return instanceItem{i.ID, state, []interfaceItem{n}}
}

type tableAnswer struct {
	XMLName   xml.Name    `xml:"DescribeRouteTablesResponse"`
	Tables    []tableItem `xml:"routeTableSet>item"`
	NextToken string      `xml:"nextToken,omitempty"`
}

type tableItem struct {
	ID     string      `xml:"routeTableId"`
	VPC    string      `xml:"vpcId"`
	Routes []routeItem `xml:"routeSet>item"`
}

type routeItem struct {
	IPv4      string `xml:"destinationCidrBlock,omitempty"`
	IPv6      string `xml:"destinationIpv6CidrBlock,omitempty"`
	List      string `xml:"destinationPrefixListId,omitempty"`
	Interface string `xml:"networkInterfaceId,omitempty"`
	Gateway   string `xml:"gatewayId,omitempty"`
	State     string `xml:"state"`
	Origin    string `xml:"origin"`
}

func (s *Server) describeTables(form url.Values) (any, *failure) {
	ids, visible := list(form, "RouteTableId"), s.visible()
	for _, id := range ids {
		if s.tables[id] == nil {
			return nil, invalid("InvalidRouteTableID.NotFound", "The routeTable ID '%s' does not exist", id)
		}
	}
	var all []tableItem
	for _, id := range s.sortedTables() {
		wanted := len(ids) == 0 || slices.Contains(ids, id)
		for name, values := range filters(form) {
			ok, known := s.matches(id, name, values)
			if !known {
				return nil, invalid("InvalidParameterValue", "The filter '%s' is invalid", name)
			}
			wanted = wanted && ok
		}
		if wanted {
			all = append(all, s.tableItem(id, visible[id]))
		}
	}
	var a tableAnswer
	a.Tables, a.NextToken = cut(s, form, all)
	return a, nil
}

// matches reports whether a table matches a filter, and whether the filter is known.
func (s *Server) matches(id, name string, values []string) (ok, known bool) {
	t := s.tables[id]
	switch {
	case name == "vpc-id":
		return slices.Contains(values, VPC), true
	case name == "association.main":
		return slices.Contains(values, strconv.FormatBool(id == MainTable)), true
	case name == "association.subnet-id":
		return t.subnet != "" && slices.Contains(values, t.subnet), true
	case strings.HasPrefix(name, "tag:"):
		return slices.Contains(values, t.tags[strings.TrimPrefix(name, "tag:")]), true
	}
	return false, false
}

// tableItem returns the description of a table. Each table also has a route to a VPC endpoint,
// whose destination is not a prefix.
func (s *Server) tableItem(id string, routes []Route) tableItem {
	item := tableItem{ID: id, VPC: VPC, Routes: []routeItem{{List: "pl-1", Gateway: "vpce-1", State: "active", Origin: "CreateRoute"}}}
	for _, r := range routes {
		one := routeItem{State: "active", Origin: r.Origin}
		if r.Dst.Addr().Is4() {
			one.IPv4 = r.Dst.String()
		} else {
			one.IPv6 = r.Dst.String()
		}
		if strings.HasPrefix(r.Target, "eni-") {
			one.Interface = r.Target
		} else {
			one.Gateway = r.Target
		}
		if s.lost(r.Target) {
			one.State = "blackhole"
		}
		item.Routes = append(item.Routes, one)
	}
	return item
}

func (s *Server) changeRoute(action string, form url.Values) (any, *failure) {
	t := s.tables[form.Get("RouteTableId")]
	if t == nil {
		return nil, invalid("InvalidRouteTableID.NotFound", "The routeTable ID '%s' does not exist", form.Get("RouteTableId"))
	}
	text := form.Get("DestinationCidrBlock") + form.Get("DestinationIpv6CidrBlock")
	dst, err := netip.ParsePrefix(text)
	if err != nil || dst != dst.Masked() || dst.Addr().Is4() != form.Has("DestinationCidrBlock") {
		return nil, invalid("InvalidParameterValue", "Value (%s) for the destination is invalid. This is not a valid CIDR block.", text)
	}
	target := form.Get("NetworkInterfaceId")
	if _, ok := s.at(target); !ok && action != "DeleteRoute" {
		return nil, invalid("InvalidNetworkInterfaceID.NotFound", "The networkInterface ID '%s' does not exist", target)
	}
	exists := slices.ContainsFunc(t.routes, func(r Route) bool { return r.Dst == dst && r.Origin == "CreateRoute" })
	switch {
	case action == "CreateRoute" && exists:
		return nil, invalid("RouteAlreadyExists", "The route identified by %s already exists.", dst)
	case action == "CreateRoute" && t.count(dst) >= s.quota:
		return nil, invalid("RouteLimitExceeded", "The maximum number of routes has been reached.")
	case action == "ReplaceRoute" && !exists:
		return nil, invalid("InvalidParameterValue", "There is no route defined for '%s' in the route table. Use CreateRoute instead.", dst)
	case action == "DeleteRoute" && !exists:
		return nil, invalid("InvalidRoute.NotFound", "no route with destination-cidr-block %s in route table %s", dst, form.Get("RouteTableId"))
	}
	if action == "DeleteRoute" {
		t.remove(dst)
	} else {
		t.put(Route{Dst: dst, Target: target, Origin: "CreateRoute"})
	}
	s.remember()
	return done{XMLName: xml.Name{Local: action + "Response"}, Return: true}, nil
}
